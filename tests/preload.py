"""What the server imports that ranks are forked from: torch, what trainings log with, and what tests are written in."""

# ruff: noqa: F401

import gc

import hypothesis
import matplotlib.backends.backend_agg
import matplotlib.figure
import pytest
import torch._dynamo
import torch.utils.tensorboard

import fastsync.ppo.trainer
import tests.attached
import tests.ranks

# A rank that looked for garbage among all this would take a copy of each page, and a third of a second.
gc.collect()
gc.freeze()
