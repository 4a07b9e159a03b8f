"""Checkpoints: written so that a crash at any moment leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fastsync.ppo.config import Settings


@dataclass(frozen=True)
class Checkpoint:
    """What a run knows at some moment."""

    model: dict[str, Any]
    """The policy's state_dict."""
    optimizer: dict[str, Any]
    """The optimizer's state_dict."""
    sync: dict[str, Any]
    """What the gradient synchronisation keeps from step to step."""
    config: Settings
    """The settings of the run."""
    step: int
    """Environment steps done, over all ranks."""


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint beside ``path``, waits until the disk has it, and renames it over ``path``."""
    content = {
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
        "sync": checkpoint.sync,
        "config": asdict(checkpoint.config),
        "step": checkpoint.step,
    }
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint onto the CPU. Nothing in the file is executed."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    return Checkpoint(
        model=content["model"],
        optimizer=content["optimizer"],
        sync=content["sync"],
        config=Settings(**content["config"]),
        step=content["step"],
    )
