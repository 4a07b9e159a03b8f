"""Shows rows: tables in the terminal, and reports with JSON, CSV, Markdown, pictures and one page of HTML."""
