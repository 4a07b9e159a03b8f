"""Each pair of features gives what plain PyTorch gives in one process, or an error."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.pairs import (
    CLIP,
    CLIP_SEVERAL,
    ELASTIC,
    FEATURES,
    FROZEN,
    LOST,
    OVERLAP,
    PAIRS,
    REFUSED,
    Layout,
    plain,
    train,
)
from tests.ranks import renew_group, run_ranks


@pytest.mark.parametrize("feature", FEATURES[:-1])
def test_pairs_with_those_behind_it(feature: str, tmp_path: Path) -> None:
    """Ranks try several pairs, one after the other, unless one of them is lost. What is frozen stays so."""
    of_feature = [pair for pair in PAIRS if min(pair, key=FEATURES.index) == feature]
    of_feature.sort(key=lambda pair: (Layout(pair).world_size, loses(pair), FROZEN in pair))
    for (world_size, is_lost), same in groupby(of_feature, lambda pair: (Layout(pair).world_size, loses(pair))):
        for pairs in [[pair] for pair in same] if is_lost else [[*same]]:
            lost = [LOST] if is_lost else []
            of_ranks = run_ranks(train_each, world_size, pairs, str(tmp_path), lost=lost)
            left = [each for rank, each in enumerate(of_ranks) if rank not in lost]
            for pair, *results in zip(pairs, *left, strict=True):
                check(pair, results)


def loses(pair: frozenset[str]) -> bool:
    return ELASTIC in pair and pair not in REFUSED


def train_each(rank: int, world_size: int, pairs: list[frozenset[str]], folder: str) -> list[list[Tensor] | str]:
    results = []
    for number, pair in enumerate(pairs):
        renew_group(number, shared_memory=OVERLAP not in pair)  # which has nothing to overlap in shared memory
        results.append(train(rank, world_size, pair, f"{folder}/{'+'.join(sorted(pair))}"))
    return results


def check(pair: frozenset[str], of_ranks: list[list[Tensor] | str]) -> None:
    if pair in REFUSED:
        assert [type(each) for each in of_ranks] == [str] * len(of_ranks), f"{pair} is not refused on all ranks"
        assert {each.partition(":")[0] for each in of_ranks} <= {"ValueError", "RuntimeError"}, pair
        return
    expected = plain(pair)
    tolerance = 2.0**-21 if pair & {CLIP, CLIP_SEVERAL} else 2.0**-42  # the norm is a float32
    for weights in of_ranks:
        assert not isinstance(weights, str), f"{pair}: {weights}"
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{pair}: {text}")
