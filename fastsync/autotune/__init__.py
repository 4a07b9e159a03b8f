"""Choosing what gradients travel with by measuring the process group."""
