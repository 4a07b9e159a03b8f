"""A run on disk and on screen: folder, checkpoints, metrics, loggers, console."""
