"""Runs: their folders, their checkpoints, their figures."""
