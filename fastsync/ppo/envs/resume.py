"""Going back to saved environments: a trial whether that is exact, and who gets which in another world."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastsync.ppo.envs.interface import Environments, Step
from fastsync.ppo.envs.replay import same_values
from fastsync.ppo.envs.spaces import random_actions
from fastsync.ppo.envs.vector import RecordedEnvironments

# A trial begins with some episodes of so many steps, as what they leave behind in the environment may change later
# ones: Box2D's BipedalWalker shows it only when a walker that was restored in the air touches the ground.
EPISODES_BEFORE = 3
STEPS_BEFORE = 100
STEPS_TO_REPEAT = 20
STEPS_AFTER = 300


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial of saving and restoring."""

    is_restorable: bool
    """Whether to save what it takes to go back, and to do so. True also where the trial was not long enough."""
    note: str | None = None
    """What to tell the user, in a sentence without an end."""


def try_restoring(make: Callable[[], Environments], seconds: float) -> Trial:
    """Tries out whether environments of this kind go on exactly from a saved state.

    Some are stepped with random actions through a few episodes and saved; spare ones, which know nothing of that, are
    set to what was saved; then both must do the same for some time. A difference that shows later goes unnoticed.

    Args:
        make: a few environments.
        seconds: after which the trial is given up. A single step or reset may take longer.
    """
    try:
        with make() as first, make() as spare:
            difference = _differs_after_restore(first, spare, time.monotonic() + seconds)
    except _OutOfTimeError:
        return Trial(
            True, f"{seconds:g} s were not long enough to try out whether the environments can be saved exactly"
        )
    except Exception as error:  # whatever the user's environment does in a trial, training may yet work
        difference = f"a trial to save and restore it failed with {error!r}"
    return Trial(difference is None, difference)


class _OutOfTimeError(Exception):
    """The trial takes too long."""


def redistribute(
    states: Sequence[dict[str, Any]], *, rank: int, world_size: int, num_envs: int
) -> dict[str, Any] | None:
    """Picks what a rank restores out of the states of all ranks of the run before.

    In the same world each rank gets its own. In another one environments that are replayed keep their numbers among
    all ranks and go to whoever has these numbers now; a rank that has more than there are begins new ones.

    Args:
        states: what ``Environments.state`` gave on each rank of the run before, in rank order.
        rank: of the world now.
        world_size: of the world now.
        num_envs: per rank, now.

    Returns:
        For ``Environments.restore``, or None where this rank begins anew.
    """
    if not is_other_world(states, world_size=world_size, num_envs=num_envs):
        return states[rank]
    if not all(_keeps_numbers(state) for state in states):
        return None
    ordered = sorted(states, key=lambda state: int(state["first_index"]))
    mine = slice(rank * num_envs, (rank + 1) * num_envs)
    episodes = [episode for state in ordered for episode in state["episodes"]][mine]
    if not episodes:
        return None
    rows = {
        name: torch.cat([state[name] for state in ordered])[mine].clone()
        for name in ("observations", "returns", "lengths", "restarting")
    }
    return {**ordered[0], "first_index": mine.start, "episodes": episodes, **rows}


def is_other_world(states: Sequence[dict[str, Any]], *, world_size: int, num_envs: int) -> bool:
    """Tells whether the ranks, or the environments per rank, are not as many as those that were saved."""
    return [len(state["returns"]) for state in states] != [num_envs] * world_size


def what_goes_on(states: Sequence[dict[str, Any]], *, world_size: int, num_envs: int) -> str | None:
    """A sentence about the environments of a run that goes on in another world; None if it is the same world."""
    if not is_other_world(states, world_size=world_size, num_envs=num_envs):
        return None
    old, new = sum(len(state["returns"]) for state in states), world_size * num_envs
    if not all(_keeps_numbers(state) for state in states):
        return f"all {new} environments begin new episodes: those saved can only go on in the same number per rank"
    if new == old:
        return f"the {old} environments go on where they were, spread over the ranks anew"
    if new < old:
        return f"{new} of {old} environments go on where they were; the others are dropped"
    return f"the {old} environments go on where they were, and {new - old} new ones begin"


def begun_anew(indices: Iterable[int]) -> str | None:
    """A sentence about environments that ``restore`` could not bring back, by their numbers; None if there are none."""
    numbers = sorted(indices)
    if not numbers:
        return None
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return (
        f"{len(numbers)} environments ({listed}) could not be brought back to exactly where they were, and began new "
        f"episodes: this run is not bitwise what it would have been without the interruption"
    )


def _keeps_numbers(state: dict[str, Any]) -> bool:
    return bool(state["kind"] == RecordedEnvironments.__name__)


def _differs_after_restore(first: Environments, spare: Environments, deadline: float) -> str | None:
    generator = np.random.default_rng(0)

    def actions() -> Any:
        if time.monotonic() > deadline:
            raise _OutOfTimeError
        return random_actions(first.single_action_space, first.num_envs, generator)

    for length in [STEPS_BEFORE] * EPISODES_BEFORE + [STEPS_TO_REPEAT]:
        first.reset()
        for _ in range(length):
            observations = first.step(actions()).observations
    observations = np.array(observations)
    restored = spare.restore(first.state())
    if spare.begun_anew:
        return "repeating an episode from its seed with its actions leads to other observations"
    if not same_values(observations, np.array(restored)):
        return "a restored state has other observations"
    for number in range(STEPS_AFTER):
        batch = actions()
        expected = _values(first.step(batch.copy()))
        difference = next((n for n, v in _values(spare.step(batch)).items() if not same_values(v, expected[n])), None)
        if difference:
            return f"{difference} differ {number + 1} steps after a state was restored"
    return None


def _values(step: Step) -> dict[str, Any]:
    names = ("observations", "rewards", "terminated", "truncated", "valid")
    return {name: np.array(getattr(step, name)) for name in names} | {
        "finished episodes": np.array([[e.index, e.episode_return, e.length] for e in step.episodes])
    }
