"""Who is left, and how a training goes on."""
