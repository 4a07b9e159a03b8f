"""What the other tests rest on: ranks that fail, die or hang, comparisons by bits, and the rule of the gpu marker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.bitwise import assert_bitwise_equal
from tests.conftest import pytest_runtest_setup
from tests.models import assert_same_on_all_ranks
from tests.ranks import RankError, RankTimeoutError, on_ranks, run_ranks


def _number(rank: int, world_size: int, ending: str) -> int:
    if rank == 1 and ending == "raises":
        raise ValueError("the cup is empty")
    if rank == 1 and ending == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and ending == "hangs":
        time.sleep(600)
    dist.barrier()
    return rank + world_size


def test_results_come_in_rank_order() -> None:
    assert run_ranks(_number, 3, "returns") == [3, 4, 5]


@pytest.mark.parametrize(
    ("ending", "said"), [("raises", r"(?s)in _number.*ValueError: the cup is empty"), ("dies", "died of SIGKILL")]
)
def test_the_rank_that_failed_first_is_named(ending: str, said: str) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first\n") as info:
        run_ranks(_number, 2, ending)
    info.match(said)
    assert multiprocessing.active_children() == []


def test_hang_ends_at_the_timeout_tells_where_and_leaves_no_process() -> None:
    with pytest.raises(RankTimeoutError, match=r"(?s)ranks \[0, 1\] of 2 did not finish within 8 s.* in _number"):
        run_ranks(_number, 2, "hangs", timeout=8.0)
    assert multiprocessing.active_children() == []


@on_ranks(parametrized=("shared_memory",))
def _is_told(rank: int, world_size: int, most: int) -> None:
    assert os.environ["FASTSYNC_SHARED_MEMORY"] == "0"
    assert rank + world_size <= most, f"rank {rank} of {world_size}"


def test_a_body_for_ranks_is_told_the_tests_parameters_and_fails_the_test() -> None:
    _is_told(world_size=2, most=3, shared_memory=False)
    with pytest.raises(RankError, match="rank 1 of 2"):
        _is_told(world_size=2, most=2, shared_memory=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_compared_but_for_those_of_a_nan(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -0.0, float("inf")], [1.5, -2.0, float("nan")]], dtype=dtype)
    assert_bitwise_equal(values, values.t().contiguous().t())
    for other in (values[0], values.double() if dtype != torch.float64 else values.float()):
        with pytest.raises(AssertionError, match=r" of shape .* is not "):
            assert_bitwise_equal(values, other)
    for index, other in {(0, 0): -0.0, (0, 2): 1.0, (1, 2): 0.0}.items():
        changed = values.clone()
        changed[index] = other
        with pytest.raises(AssertionError, match=rf"1 of 6 elements differ, the first at \[{index[0]}, {index[1]}\]"):
            assert_bitwise_equal(changed, values)


@on_ranks(2)
def test_what_differs_between_ranks_is_named(rank: int, world_size: int) -> None:
    assert_same_on_all_ranks([torch.ones(3, 2).t()])
    with pytest.raises(AssertionError, match=rf"tensor 1 here and on rank {1 - rank}: 1 of 2 elements differ"):
        assert_same_on_all_ranks([torch.ones(3), torch.tensor([1.0, rank], dtype=torch.bfloat16)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_gpu_marker_without_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_WITHOUT_CUDA", "1")
    pytest_runtest_setup(request.node)  # which has no such marker
    # Only for this test: another one looks at the markers of all tests.
    monkeypatch.setattr(request.node, "own_markers", [*request.node.own_markers, pytest.mark.gpu.mark])
    with pytest.raises(pytest.fail.Exception, match=r"^FAIL_WITHOUT_CUDA=1, but torch sees no CUDA device$"):
        pytest_runtest_setup(request.node)
    monkeypatch.setenv("FAIL_WITHOUT_CUDA", "0")
    with pytest.raises(pytest.skip.Exception, match=r"^torch sees no CUDA device$"):
        pytest_runtest_setup(request.node)
