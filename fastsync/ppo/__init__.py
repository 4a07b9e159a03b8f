"""Proximal policy optimisation over many ranks, whose gradients go through fastsync."""

from fastsync.installation import load

load("_C")
load("_ppo")
