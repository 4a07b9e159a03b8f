"""The subjects: fastsync, its baselines and the limits, and the work that they are given."""
