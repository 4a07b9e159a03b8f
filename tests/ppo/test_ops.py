"""What the trainer computes by operators and an optimizer of its own, against plain PyTorch."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from fastsync import _ppo
from fastsync.ppo import fused
from fastsync.ppo.adam import Adam
from fastsync.ppo.distributions import Categorical, categorical, choose
from fastsync.ppo.fused import METRICS, Perceptron, what_ran
from fastsync.ppo.policies import ActorCritic, Policy, make_policy
from fastsync.ppo.ppo import Batch, Evaluated, Settings, ppo_loss
from fastsync.ppo.ppo import minibatch_loss as written_loss
from tests.refused import refused

minibatch_loss = fused.Operator(written_loss)


def view_of(values: Tensor) -> Tensor:
    """The same values, which do not lie one behind the other."""
    return torch.stack([values, torch.zeros_like(values)], dim=-1)[..., 0]


def layers(sizes: tuple[int, ...] = (4, 32, 16, 3), activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        modules += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*modules[:-1])


@pytest.mark.parametrize("shape", [(4,), (5, 3, 4), (0, 4)])
def test_perceptron_is_its_layers(shape: tuple[int, ...]):
    plain = layers()
    fused = Perceptron(*copy.deepcopy(plain))
    assert list(fused.state_dict()) == list(plain.state_dict())
    inputs = torch.randn(shape, requires_grad=True)
    also_inputs = inputs.detach().clone().requires_grad_()
    expected, result = plain(inputs), fused(also_inputs)
    assert "Perceptron" in result.grad_fn.name() or "Perceptron" in result.grad_fn.next_functions[0][0].name()
    torch.testing.assert_close(result, expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    result.backward(grad)
    torch.testing.assert_close(also_inputs.grad, inputs.grad)
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(fused(inputs), result)


@pytest.mark.parametrize("sizes", [(3, 70, 33, 5), (17, 64, 1), (130, 16, 4), (20, 260, 260, 2)])
@pytest.mark.parametrize("num_rows", [1, 5, 64, 700])
def test_perceptron_of_any_size(sizes: tuple[int, ...], num_rows: int):
    plain = layers(sizes)
    fused, exact = Perceptron(*copy.deepcopy(plain)), copy.deepcopy(plain).double()
    inputs, grad = torch.randn(num_rows, sizes[0]), torch.randn(num_rows, sizes[-1])
    results, grads = [], []
    for model in (fused, exact):
        rows = inputs.to(next(model.parameters()).dtype, copy=True).requires_grad_()
        results.append(model(rows))
        results[-1].backward(grad.to(results[-1].dtype))
        grads.append([each.grad for each in (rows, *model.parameters())])
    # A sum of n terms is off by sqrt(n) eps (Higham and Mary 2019): over inputs in each layer, and over rows. Terms may
    # cancel out, so what is off counts beside the largest of all.
    unit = torch.finfo(torch.float32).eps * (len(sizes) - 1)
    mine, true = results
    assert (mine - true).abs().max() <= unit * max(sizes) ** 0.5 * max(1.0, true.abs().max())
    unit *= num_rows**0.5 + max(sizes) ** 0.5
    largest = max(each.abs().max() for each in grads[1])
    for mine, true in zip(*grads, strict=True):
        assert (mine - true).abs().max() <= unit * largest


def test_sums_over_many_rows_are_exact():
    ones, inputs = [torch.ones(1, 1)] * 2, torch.full((100_000, 1), 0.1)
    weights, biases = ([each.clone().requires_grad_() for each in ones] for _ in range(2))
    _ppo.perceptron(inputs, weights, [bias.flatten() for bias in biases]).mean().backward()
    exact = [each.detach().double().requires_grad_() for each in weights + biases]
    hidden = torch.tanh(inputs.double() @ exact[0] + exact[2])
    expected = torch.autograd.grad((hidden @ exact[1] + exact[3]).mean(), exact)
    torch.testing.assert_close([each.grad.double() for each in weights + biases], list(expected), rtol=3e-5, atol=0)


@pytest.mark.parametrize("viewed", range(3))
def test_perceptron_takes_views(viewed: int):
    torch.manual_seed(0)
    operands = [torch.randn(7, 4), torch.randn(3, 4), torch.randn(3)]
    operands[viewed] = view_of(operands[viewed])
    inputs, weight, bias = (each.requires_grad_() for each in operands)
    result = _ppo.perceptron(inputs, [weight], [bias])
    expected = nn.functional.linear(inputs, weight, bias)
    torch.testing.assert_close(result, expected)
    grad = torch.randn(7, 3)
    mine, theirs = (torch.autograd.grad(outputs, operands, grad) for outputs in (result, expected))
    torch.testing.assert_close(mine, theirs)


def test_perceptron_under_autocast_casts_as_its_layers():
    plain = layers()
    with torch.autocast("cpu", torch.bfloat16):
        result = Perceptron(*plain)(torch.ones(2, 4))
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, plain(torch.ones(2, 4)))


def test_perceptron_refuses_what_does_not_fit():
    op, weight, bias = _ppo.perceptron, torch.ones(3, 4), torch.ones(3)
    refused(lambda: op(torch.ones(2, 4), [weight], []), "biases:")
    refused(lambda: op(torch.ones(2, 5), [weight], [bias]), "weights:")
    refused(lambda: op(torch.ones(2, 4, dtype=torch.float64), [weight], [bias]), "input:")
    output = op(torch.ones(2, 4), [weight.requires_grad_()], [bias])
    with pytest.raises(NotImplementedError, match=r"perceptron has no second derivative"):
        torch.autograd.grad(output.sum(), weight, create_graph=True)


def tanh(values: Tensor) -> Tensor:
    one, zero = torch.ones(1, 1), torch.zeros(1)
    return _ppo.perceptron(values.unsqueeze(1), [one, one], [zero, zero]).squeeze(1)


def test_tanh_is_within_2_5_units_in_the_last_place():
    magnitudes = torch.cat([torch.linspace(0, 12, 1_000_001), torch.logspace(-38, 1, 1_000_001)])
    values = torch.cat([magnitudes, -magnitudes])
    exact = torch.tanh(values.double())
    unit = torch.from_numpy(np.spacing(exact.abs().float().numpy())).double()
    assert ((tanh(values).double() - exact).abs() / unit).max() < 2.5
    special = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38])
    torch.testing.assert_close(tanh(special), torch.tanh(special), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(9,), (4, 5), (0,), ()])
def test_categorical_and_choose_are_as_specified(shape: tuple[int, ...]):
    torch.manual_seed(1)
    logits = view_of(5 * torch.randn(*shape, 6)).requires_grad_()
    actions = view_of(torch.randint(6, shape))
    log_prob, entropy = Categorical(6).log_prob_and_entropy(logits, actions)
    expected = categorical.plain(logits, actions)
    torch.testing.assert_close((log_prob, entropy), expected)
    weights = torch.randn(2, *shape)
    mine = torch.autograd.grad((log_prob * weights[0] + entropy * weights[1]).sum(), logits)
    total = (expected[0] * weights[0] + expected[1] * weights[1]).sum()
    torch.testing.assert_close(mine, torch.autograd.grad(total, logits))
    torch.testing.assert_close(Categorical(6).log_prob(logits, actions), expected[0])
    noise = view_of(torch.randn(*shape, 6).round())
    for rows in (logits.detach(), torch.zeros(*shape, 6), torch.where(noise > 1, torch.nan, noise)):
        assert torch.equal(_ppo.choose(rows, noise), choose.plain(rows, noise))


def test_categorical_keeps_its_precision_far_from_zero():
    logits = torch.tensor([[1e4, 1e4 - 1], [-80.0, 80.0], [-200.0, 200.0]])
    result = _ppo.categorical(logits, torch.tensor([1, 0, 1]))
    torch.testing.assert_close(tuple(result), categorical.plain(logits, torch.tensor([1, 0, 1])))


def test_categorical_and_choose_refuse_what_does_not_fit():
    for action in (-1, 2):
        refused(lambda: _ppo.categorical(torch.ones(1, 2), torch.tensor([action])), "actions:", kind=IndexError)
    refused(lambda: _ppo.categorical(torch.ones(1, 2), torch.tensor([1, 1])), "actions:")
    refused(lambda: _ppo.choose(torch.ones(1, 2), torch.ones(2)), "noise:")
    refused(lambda: _ppo.categorical(torch.ones(1, 0), torch.tensor([0])), "logits:")


COLUMNS = ("log_prob", "entropy", "values", "old_log_probs", "advantages", "old_values", "returns", "weights")


def objective(given: dict[str, Tensor], plain: bool = False, **changes: Any) -> tuple[Tensor, Tensor]:
    """``ppo_loss`` of these columns: the loss, and METRICS [5]."""
    settings = Settings(**{"clip_coef": 0.25, "vf_coef": 0.7, "ent_coef": 0.3, "clip_value_loss": True} | changes)
    new = Evaluated(given["log_prob"], given["entropy"], given["values"], given["values"])
    batch = SimpleNamespace(**given | {"log_probs": given["old_log_probs"], "values": given["old_values"]})
    loss, figures = (ppo_loss.plain if plain else ppo_loss)(new, batch, settings, 0.25)
    assert tuple(figures) == METRICS
    return loss, torch.stack(list(figures.values()))


def columns(num_rows: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    result = {name: torch.randn(num_rows) for name in COLUMNS}
    result["weights"].abs_()
    # Within and beyond the clipping range, on its bounds, and equal to what was before.
    result["log_prob"] = result["old_log_probs"] + 0.3 * torch.randn(num_rows)
    result["values"] = result["old_values"] + 0.3 * torch.randn(num_rows)
    for name, old in (("log_prob", "old_log_probs"), ("values", "old_values")):
        result[name][:10] = result[old][:10]
    result["old_values"][10:20] = 0  # so that what is added is exact
    result["values"][10:15] = 0.25
    result["values"][15:20], result["returns"][15:20] = 0.5, 0.375  # as far off as with the bound
    result["returns"][20:25] = result["values"][20:25]
    for name in ("log_prob", "entropy", "values"):
        result[name].requires_grad_()
    return result


@pytest.mark.parametrize("plain", [False, True])
def test_the_clipping_range_may_shrink(plain: bool):
    given = columns(200)
    annealed, _ = objective(given, plain, clip_coef=0.4, anneal_clip=True)
    assert torch.equal(annealed, objective(given, plain, clip_coef=0.1)[0])
    assert not torch.equal(annealed, objective(given, plain, clip_coef=0.4)[0])


@pytest.mark.parametrize("clip_value_loss", [False, True])
def test_objective_is_as_specified(clip_value_loss: bool):
    given = columns(2000)
    learnt = [given["log_prob"], given["entropy"], given["values"]]
    loss, figures = objective(given, clip_value_loss=clip_value_loss)
    expected_loss, expected_figures = objective(given, plain=True, clip_value_loss=clip_value_loss)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(figures, expected_figures, rtol=1e-5, atol=1e-4)
    assert not figures.requires_grad
    mine = torch.autograd.grad(3 * loss, learnt)
    torch.testing.assert_close(mine, torch.autograd.grad(3 * expected_loss, learnt))


@pytest.mark.parametrize("column", COLUMNS)
def test_what_is_not_finite_shows_in_the_loss_and_in_a_gradient(column: str):
    given = {name: values.detach() for name, values in columns(50).items()}
    given[column][30] = torch.nan
    learnt = [given[name].requires_grad_() for name in ("log_prob", "entropy", "values")]
    loss, _ = objective(given)
    assert loss.isnan()
    if column != "entropy":  # the gradient does not depend on it
        assert any(grad[30].isnan() for grad in torch.autograd.grad(loss, learnt))


def test_objective_refuses_what_does_not_fit():
    given = columns(50)
    refused(lambda: objective(given | {"returns": torch.ones(49)}), "returns:")
    refused(lambda: objective(given | {"returns": torch.ones(50, requires_grad=True)}), "returns:")
    on_meta = [column.detach().to("meta") for column in given.values()]
    refused(lambda: _ppo.ppo_objective(*on_meta, 0.2, 0.5, 0.1, True), "log_prob:")


BOX, THREE = spaces.Box(-1, 1, (4,)), spaces.Discrete(3)


def minibatch(num_rows: int = 40, action_space: Any = THREE, **changes: Any) -> tuple[Policy, Batch]:
    torch.manual_seed(3)
    policy = make_policy(Settings(hidden_sizes=(16, 8), **changes), BOX, action_space)
    given = [torch.randn(num_rows) for _ in range(5)]
    actions = torch.randint(3, (num_rows, *policy.distribution.shape)).to(policy.distribution.dtype)
    return policy, Batch(torch.randn(num_rows, 4), actions, -given[0].abs(), *given[1:4], weights=given[4].abs())


@pytest.mark.parametrize("num_rows", [1, 40, 700])
@pytest.mark.parametrize("clip_value_loss", [False, True])
def test_the_loss_of_a_minibatch_is_bitwise_that_of_its_parts(num_rows: int, clip_value_loss: bool):
    policy, batch = minibatch(num_rows)
    settings, parameters = Settings(clip_value_loss=clip_value_loss), list(policy.parameters())
    results = []
    for function in (minibatch_loss, written_loss):
        loss, figures = function(policy, batch, settings, 0.5, ppo_loss)
        results.append([loss, *figures.values(), *torch.autograd.grad(4 * loss, parameters)])
    assert all(map(torch.equal, *results))


class Called(ActorCritic):
    def __call__(self, rows: Tensor) -> Any:  # type: ignore[override]
        outputs, values = super().__call__(rows)
        return outputs, 2 * values


class Decorated(ActorCritic):
    @functools.wraps(ActorCritic.value)
    def value(self, features: Tensor) -> Tensor:
        return 2 * super().value(features)


def doubled(module: nn.Module, given: Any, result: Tensor) -> Tensor:
    return 2 * result


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda policy: None,
    "a hook of the policy": lambda policy: policy.register_forward_pre_hook(lambda _, rows: (rows[0] * 2,)),
    "a hook of the actor": lambda policy: policy.actor.register_forward_hook(doubled),
    "a hook of a layer": lambda policy: policy.critic[0].register_forward_hook(doubled),
    "another layer": lambda policy: policy.actor.append(nn.Tanh()),
    "another critic": lambda policy: setattr(policy, "critic", nn.Linear(4, 1)),
    "a method": lambda policy: setattr(policy, "value", lambda features: 2 * policy.critic(features).squeeze(-1)),
    "another's method": lambda policy: setattr(policy, "value", minibatch()[0].value),
    "a layer's method": lambda policy: setattr(policy.critic, "forward", lambda rows: rows.sum(-1, keepdim=True)),
    "a distribution's method": lambda policy: setattr(
        policy.distribution, "log_prob_and_entropy", lambda *given: [2 * each for each in categorical(*given)]
    ),
    "another call": lambda policy: setattr(policy, "__class__", Called),
    "a decorator": lambda policy: setattr(policy, "__class__", Decorated),
}
OTHERS: tuple[dict[str, Any], ...] = (
    {"norm_observations": True}, {"network": "shared"}, {"action_space": BOX}, {"precision": "bf16"}, {"fused": False}
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "others"), [*((change, {}) for change in CHANGES), *(("nothing", o) for o in OTHERS)]
)
def test_one_node_stands_for_a_minibatch_only_where_it_computes_the_same(change: str, others: dict[str, Any]):
    policy, batch = minibatch(**others)
    CHANGES[change](policy)
    fused.enable(others.get("fused", True))
    try:
        given = policy, batch, Settings(precision=others.get("precision", "fp32")), 1.0, ppo_loss
        result, _ = minibatch_loss(*given)
        assert ("minibatch_loss" in what_ran().partition(";")[0]) == ((change, others) == ("nothing", {}))
        assert torch.equal(result, written_loss(*given)[0])
    finally:
        fused.enable(True)


def test_a_hook_of_all_modules_runs():
    policy, batch = minibatch()
    given = policy, batch, Settings(), 1.0, ppo_loss
    before, _ = minibatch_loss(*given)
    handle = register_module_forward_hook(lambda _, given, result: 2 * result if type(result) is Tensor else None)
    try:
        result, _ = minibatch_loss(*given)
        assert torch.equal(result, written_loss(*given)[0])
        assert not torch.equal(result, before)
    finally:
        handle.remove()


def test_an_operator_depends_on_what_its_function_uses(monkeypatch: pytest.MonkeyPatch):
    assert fused.Operator(written_loss).is_proven
    monkeypatch.setitem(written_loss.__globals__, "autocast", lambda precision, device: nullcontext())
    assert not fused.Operator(written_loss).is_proven


def test_an_update_looks_at_its_policy_once():
    policy, batch = minibatch()
    with mock.patch("fastsync.ppo.fused._perceptrons", wraps=fused._perceptrons) as look:
        for within, times in ((fused.look_once(), 1), (nullcontext(), 4)):
            with within:
                for _ in range(3):
                    minibatch_loss(policy, batch, Settings(), 1.0, ppo_loss)
            assert look.call_count == times


def test_adam_is_torchs():
    mine, theirs = layers(), layers()
    lr = torch.tensor(0.01)
    optimizers: Any = Adam(mine.parameters(), lr, 1e-5), torch.optim.Adam(theirs.parameters(), lr, eps=1e-5, fused=True)
    for step in range(8):
        lr.mul_(0.9)
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            for parameter in list(model.parameters())[step % 2 :]:  # one has no gradient every other step
                parameter.grad = torch.randn_like(parameter)
            optimizer.grad_scale = torch.tensor(2.0 + step) if step % 3 else None
            optimizer.found_inf = torch.tensor(float(step == 4)) if step % 4 == 0 else None
            optimizer.step()
        assert all(map(torch.equal, mine.parameters(), theirs.parameters()))
        if step == 5:
            for optimizer, other in (optimizers, optimizers[::-1]):
                state = copy.deepcopy(other.state_dict())
                state["state"].pop(0, None)  # as of a parameter that never had a gradient
                state["param_groups"][0]["weight_decay"] = 0.1
                optimizer.load_state_dict(state)
