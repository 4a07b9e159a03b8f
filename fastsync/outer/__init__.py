"""Weights, once in many steps: DiLoCo and LocalSGD."""
