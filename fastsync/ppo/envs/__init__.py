"""The environments of a rank: making them, stepping them, saving and restoring their state."""
