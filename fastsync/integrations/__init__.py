"""One line in trainers that wrap models, or place ranks, themselves."""
