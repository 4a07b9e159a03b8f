"""Tests of speed. Every figure is a ratio to a baseline and to the limit, measured in the same run.

``python -m benchmarks`` lists the commands.
"""
