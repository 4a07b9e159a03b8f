"""One line for trainers that wrap models or start ranks themselves."""
