"""``fastsync export``: a trained policy as a file that needs neither fastsync nor its environment."""

from __future__ import annotations

import importlib.util
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import torch
import tyro
from gymnasium import Space
from torch import Tensor, nn

from ..doctor import install_command
from ..launch.options import read_options
from .distributions import Categorical
from .envs.interface import EnvironmentFailedError, Environments
from .envs.spaces import Array, tensor_translator
from .evaluate import find_checkpoint, make_environment, restore_policy, runs_here
from .evaluation import kept_generators
from .files import write_whole
from .names import kept_folder, look_in
from .policies import FORBIDDEN, Policy
from .whole_numbers import WHOLE_NUMBERS

NUM_OBSERVATIONS = 1000
"""How many observations of its environment the exported policy is compared on."""

TOLERANCE = 1e-5
"""The most that actions, or the logits of chosen ones, may differ, as a share of the largest and at least of 1."""

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

Runs: TypeAlias = Callable[..., Sequence[Array]]
"""What was exported: maps arrays to arrays, in the order of ``Exported.forward``."""


@dataclass(frozen=True)
class Export:
    """Write a trained policy into a file: observations in, the likeliest actions out, as the environment takes them."""

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """The folder of a run, which stands for its best checkpoint, or a checkpoint."""
    onnx: str | None = None  # File to write for ONNX Runtime and the like, such as policy.onnx.
    torchscript: str | None = None  # File to write for torch.jit.load, also in C++, such as policy.pt.
    newest: bool = False  # Export the newest checkpoint of the run, and not the best.

    def __post_init__(self) -> None:
        if self.run is None:
            raise ValueError(f"say which run to export; {runs_here('export')}")
        if self.onnx is None and self.torchscript is None:
            raise ValueError("say which file to write: --onnx policy.onnx, or --torchscript policy.pt")
        if self.onnx is not None and self.onnx == self.torchscript:
            raise ValueError(f"onnx and torchscript are both {self.onnx!r}; they are two files")


class Exported(nn.Module):
    """A policy from observations ``[N, *shape]`` to actions ``[N, *action_shape]``, as ``Policy.act`` computes them.

    A recurrent one also takes states [N, S], and returns those of the next step. They are zeros at the start of an
    episode.
    """

    def __init__(self, policy: Policy, action_space: Space[Any]) -> None:
        super().__init__()
        self.policy = policy
        self.action_space: Any = action_space
        self._translate = tensor_translator(action_space, torch.device("cpu"))

    @property
    def outputs(self) -> list[str]:
        """The names of what it returns."""
        return ["actions"] if self.policy.recurrent is None else ["actions", "next_states"]

    def forward(self, observations: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        observations = self.policy.padded(observations)
        if self.policy.recurrent is None:
            return (self._translate(self.policy.likeliest(observations)),)
        memory = self.policy.new_memory()
        (memory.states,) = states
        return self._translate(self.policy.likeliest(observations, memory)), memory.states


def main(arguments: Sequence[str]) -> int:
    """Runs the command, and prints what was written.

    Returns:
        The exit status: 0, or 1 if the checkpoint is damaged, or if the exported policy acts otherwise.

    Raises:
        ValueError: no checkpoint is found, its environment or policy cannot be made or exported, a package is missing,
            or the file cannot be written.
    """
    options = read_options(Export, "fastsync export", arguments, registry=WHOLE_NUMBERS)
    assert options.run is not None
    if options.onnx is not None:
        _check_packages(options.onnx)
    look_in(Path.cwd())
    try:
        with kept_folder():
            policy, reference, environment = _load(Path(options.run).expanduser(), newest=options.newest)
    except RuntimeError as error:
        _say(str(error))
        return 1
    with environment:
        for sentence in environment.notes:
            _say(sentence)
        try:
            seen = seen_in(policy, environment)
        except EnvironmentFailedError as error:
            traceback.print_exception(error.__cause__)  # where in the user's code
            _say(str(error))
            return 1
        exported = Exported(policy, environment.single_action_space).eval().requires_grad_(False)
        for file, make in ((options.onnx, to_onnx), (options.torchscript, to_torchscript)):
            if file is not None and not _export(exported, reference, seen, Path(file).expanduser(), make):
                return 1
    return 0


def _say(sentence: str) -> None:
    print(f"fastsync export: {sentence}", file=sys.stderr)


def _check_packages(file: str) -> None:
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"onnx={file!r} needs {', '.join(missing)}: {install_command('export')}; --torchscript needs nothing more"
        )


def _load(path: Path, *, newest: bool) -> tuple[Policy, Policy, Environments]:
    """Makes the policy of a run in plain PyTorch, which exporters can read, and as ``load_policy`` does.

    The third is an environment to try them in.
    """
    _, checkpoint = find_checkpoint(path, newest=newest)
    plain = replace(checkpoint, settings=checkpoint.settings | {"fused": False, "precision": "fp32"})
    with kept_generators(torch.device("cpu")):
        environment = make_environment(checkpoint, path, seed=0)
        policy, reference = (restore_policy(each, path, environment).eval() for each in (plain, checkpoint))
        return policy, reference, environment


class Seen(NamedTuple):
    """What a policy has seen in an environment."""

    observations: Array  # [n, *shape], as the environment gives them
    begins: list[bool]  # whether each is the first of an episode


@torch.no_grad()
def seen_in(policy: Policy, environment: Environments) -> Seen:
    """Returns what the policy sees if it samples its actions."""
    torch.manual_seed(0)
    seen, begins, begin, memory = list[Array](), list[bool](), True, policy.new_memory()
    remembered = () if policy.recurrent is None else (memory,)
    observations = environment.reset()
    while len(seen) < NUM_OBSERVATIONS:
        given = np.array(observations)
        row = torch.from_numpy(given).to(policy.observation_dtype)
        if row.isfinite().all():  # the last one of an episode in which a simulation has failed is not
            seen.append(given[0])
            begins.append(begin)
        step = environment.step(policy.sampled(row.nan_to_num(), *remembered).numpy())
        observations, begin = step.observations, not step.valid[0]
        memory.reset(~step.valid)
    return Seen(np.stack(seen)[:, policy._num_critic :], begins)


def _export(
    exported: Exported, reference: Policy, seen: Seen, file: Path,
    make: Callable[[Exported, tuple[Tensor, ...]], tuple[bytes, Runs]],
) -> bool:  # fmt: skip
    """Writes one file. Returns False, and writes none, if what it would hold acts otherwise than ``reference``."""
    inputs = torch.from_numpy(seen.observations).to(exported.policy.observation_dtype)
    example = (inputs[:2], *([exported.policy.new_memory(2).states] * (len(exported.outputs) - 1)))
    try:
        content, run = make(exported, example)
    except Exception as error:  # any error of torch's exporters, or of the user's class
        kind, reason = type(exported.policy).__name__, error.__cause__ or error
        first = str(reason).strip().partition("\n")[0]
        raise ValueError(f"{kind} cannot be exported to {file}: {type(reason).__name__}: {first}") from error
    actions = _played(exported, inputs.numpy(), seen.begins, run)
    difference, allowed = differences(exported, reference, seen, actions)
    told = f"over {len(actions):,} observations, actions differ from those of load_policy by at most"
    if not difference <= allowed:
        print(
            f"fastsync export: {told} {difference:.2g}, and {allowed:.2g} is allowed: {file} is not written. Does the "
            "policy decide by values of tensors in Python, such as by an if?",
            file=sys.stderr,
        )
        return False
    try:
        write_whole(file, content)
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from error
    takes = [f"{name} {_kind(each)}" for name, each in zip(("observations", "states"), example, strict=False)]
    gives = [f"actions {_kind(actions)}", *(f"next_states {_kind(each)}" for each in example[1:])]
    print(f"{file}: {', '.join(takes)} -> {', '.join(gives)}\n  {told} {difference:.2g} ({allowed:.2g} is allowed)")
    return True


def _kind(rows: Any) -> str:
    return f"{str(rows.dtype).removeprefix('torch.')} [{', '.join(map(str, ['N', *rows.shape[1:]]))}]"


def _played(exported: Exported, observations: Array, all_begin: Sequence[bool], run: Runs) -> Array:
    """Returns the actions that what was exported takes: at once, or one after the other if it is recurrent."""
    if exported.policy.recurrent is None:
        return run(observations)[0]
    actions, nothing = list[Array](), exported.policy.new_memory().states.numpy()
    states = nothing
    for row, begins in zip(observations, all_begin, strict=True):
        chosen, states = run(row[None], nothing if begins else states)
        actions.append(chosen)
    return np.concatenate(actions)


@torch.no_grad()
def differences(exported: Exported, policy: Policy, seen: Seen, actions: Array) -> tuple[float, float]:
    """Returns the largest difference of actions from those of ``policy.act``, and how large it may be.

    Where another choice was made, it is how much smaller its logit is: two that are nearly equal are both right.
    """
    distribution, memory, expected, outputs = policy.distribution, policy.new_memory(), list[Array](), list[Tensor]()
    rows = seen.observations[None] if policy.recurrent is None else seen.observations[:, None]  # at once, or one by one
    for row, begins in zip(rows, seen.begins, strict=False):
        if begins:
            memory.reset()
        before = memory.states
        outputs.append(policy.decide(policy.padded(torch.from_numpy(row).to(policy.observation_dtype)), memory))
        memory.states = before
        expected.append(policy.act(row, memory=memory))
    expects, all_outputs = np.concatenate(expected), torch.cat(outputs)
    if not isinstance(distribution, Categorical):
        return float(np.abs(actions - expects).max()), TOLERANCE * max(1.0, float(np.abs(expects).max()))
    chosen = torch.from_numpy(actions - exported.action_space.start).view(len(actions), -1)
    smaller = [
        each.amax(-1) - each.gather(-1, number.unsqueeze(-1)).squeeze(-1)
        for each, number in zip(distribution.choices(all_outputs), chosen.unbind(-1), strict=True)
    ]
    largest = all_outputs[all_outputs > FORBIDDEN].abs().max()
    differ = torch.from_numpy(actions != expects).view(len(actions), -1)
    return float((torch.stack(smaller, -1) * differ).max()), TOLERANCE * max(1.0, float(largest))


def to_torchscript(exported: Exported, example: tuple[Tensor, ...]) -> tuple[bytes, Runs]:
    """Traces it. Returns the content of a file for ``torch.jit.load``, and the function that is in it."""
    file = io.BytesIO()
    with _quiet():
        torch.jit.save(torch.jit.trace(exported, example, check_trace=False), file)
        file.seek(0)
        loaded = torch.jit.load(file)
    return file.getvalue(), lambda *arrays: [each.numpy() for each in loaded(*map(torch.from_numpy, arrays))]


def to_onnx(exported: Exported, example: tuple[Tensor, ...]) -> tuple[bytes, Runs]:
    """Returns the content of an ONNX file, and the function that ONNX Runtime makes of it."""
    import onnxruntime

    names, rows = ["observations", "states"][: len(example)], torch.export.Dim("N")
    with _quiet():
        program = torch.onnx.export(
            exported, example, dynamo=True, verbose=False, input_names=names, output_names=exported.outputs,
            dynamic_shapes=({0: rows}, ({0: rows},))[: len(names)],
        )  # fmt: skip
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda *arrays: session.run(None, dict(zip(names, arrays, strict=True)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out the exporters' warnings inside a ``with`` block: of constants, of packages, that they are old."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
