"""The subjects: fastsync, its rivals and the limits, and the work that they are given."""
