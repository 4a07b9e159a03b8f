"""Chooses a compression by measuring the process group."""
