"""What ``tools/same_bits.py`` calls the same, and which cases it draws."""

from __future__ import annotations

import math

import torch

from tools.same_bits import Case, difference, hash_of


def test_bits_are_compared_but_for_those_of_a_nan():
    values = torch.tensor([0.0, 1.5, math.nan])
    other_nan = values.view(torch.int32).clone().add_(torch.tensor([0, 0, 1], dtype=torch.int32)).view(torch.float32)
    assert hash_of(values) == hash_of(other_nan)
    for other in (torch.tensor([-0.0, 1.5, math.nan]), values.double(), values.view(1, 3), values[:2], None):
        assert hash_of(values) != hash_of(other)


def test_the_first_difference_is_named_with_its_rank():
    assert difference([{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "2"}]) is None
    assert difference([{"a": "1"}, {"a": "2"}], [{"a": "1"}, {"a": "3"}]) == "rank 1, a: 2 became 3"
    assert difference([{"a": "1"}], [{"error": "E"}]) == "rank 0, error: absent became E"


def test_cases_follow_from_seed_and_number_and_reach_every_entry_point_and_algorithm():
    cases = [Case(0, number) for number in range(200)]
    assert repr(cases) == repr([Case(0, number) for number in range(200)])
    assert {case.entry_point for case in cases} == {"hook", "attach", "attach without overlap", "one call"}
    assert {case.world_size for case in cases} == {1, 2, 3, 4}
    assert {case.compression.get("algorithm") for case in cases} == {None, "one_shot", "two_shot"}
    assert any("ranks_per_node" in case.compression for case in cases)
