"""Gradients, in every step: attach, DDP hooks, FSDP2 hooks, and what they share."""
