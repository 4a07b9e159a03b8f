"""Tests of speed. Every figure is a ratio to a rival and to the limit, measured in the same run."""
