"""Reports: from rows to a folder with JSON, CSV, Markdown, pictures, and one page of HTML that needs nothing else."""

from benchmarks.report.command import main
from benchmarks.report.document import Document, Picture, Section, Table
from benchmarks.report.folder import check_folder, write_report

__all__ = ["Document", "Picture", "Section", "Table", "check_folder", "main", "write_report"]
