"""Proximal policy optimisation over many ranks, whose gradients go through fastsync."""
