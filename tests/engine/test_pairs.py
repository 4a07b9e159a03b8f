"""Each pair of features gives what plain PyTorch gives in one process, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.pairs import CLIP, CLIP_SEVERAL, ELASTIC, LOST, PAIRS, REFUSED, Layout, plain, train
from tests.ranks import run_ranks


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " and ".join(sorted(pair)))
def test_a_pair(pair: frozenset[str], tmp_path: Path) -> None:
    lost = [LOST] if ELASTIC in pair and pair not in REFUSED else []
    of_ranks = run_ranks(train, Layout(pair).world_size, pair, str(tmp_path / "store"), timeout=60.0, lost=lost)
    if pair in REFUSED:
        assert [type(each) for each in of_ranks] == [str] * len(of_ranks), "it is not refused on all ranks"
        assert {each.partition(":")[0] for each in of_ranks} <= {"ValueError", "RuntimeError"}
        return
    expected = plain(pair)
    tolerance = 2.0**-21 if pair & {CLIP, CLIP_SEVERAL} else 2.0**-42  # the norm is a float32
    for weights in (each for rank, each in enumerate(of_ranks) if rank not in lost):
        assert not isinstance(weights, str), weights
        for mine, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
