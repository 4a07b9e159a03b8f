"""Predicts what a sync costs elsewhere: a model, and its parameters from measured rows."""
