"""What a bucket keeps on a device beside its gradients: tables of them, which are written only where they change."""

from __future__ import annotations

import torch
from torch import Tensor

from tests import fake_device
from tests.bitwise import assert_bitwise_equal
from tests.fake_device import DEVICE, unwaited, watched

NUMELS = [700, 3, 256]


class Packed:
    """Gradients and their wire. All of them share a workspace, as if they were one bucket's from step to step."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.grads = [torch.randn(numel, generator=generator).to(DEVICE) for numel in NUMELS]
        self.wire = torch.zeros(sum(NUMELS), device=DEVICE)
        self.stats = torch.zeros(4, dtype=torch.float64, device=DEVICE)

    def pack(self) -> None:
        torch.ops.fastsync.pack(self.grads, self.wire, self.stats, workspace=1)

    def check(self) -> None:
        expected: Tensor = torch.cat([grad.cpu() for grad in self.grads])
        assert_bitwise_equal(self.wire.cpu(), expected)


def _writes_tables_where_they_change(rank: int, world_size: int) -> None:
    extension = fake_device.load()
    packed = [Packed(seed) for seed in range(8)]
    extension.take_uploads()

    def uploads_of(*order: int) -> int:
        for index in order:
            packed[index].grads[1].add_(1)
            packed[index].pack()
            packed[index].check()
        return extension.take_uploads()

    with watched():
        assert uploads_of(0, 0, 0) == 1
        assert uploads_of(1, 0, 1, 0) == 1  # gradients that take turns between two places
        assert uploads_of(2, 3, 0, 1, 2, 3) == 2
        assert uploads_of(4, 5) == 2  # as many as are kept
        assert uploads_of(6, 7, 0, 1, 2, 3) == 6
        torch.ops.fastsync.unpack(packed[3].wire, packed[3].grads, packed[3].stats, workspace=1)  # they lie there, too
        assert extension.take_uploads() == 0
        packed[3].check()


def test_tables_are_written_only_where_gradients_lie_elsewhere() -> None:
    fake_device.run_ranks(_writes_tables_where_they_change, 1)


def _has_tables_for_each_stream(rank: int, world_size: int) -> None:
    """Each is let go in the order of the stream that it was used on."""
    extension = fake_device.load()
    streams = [torch.Stream(device=DEVICE) for _ in range(3)]
    packed = [Packed(seed) for seed in range(3)]
    extension.take_uploads()
    with watched(), unwaited():
        last = torch.accelerator.current_stream()
        for _ in range(4):
            for each in packed:
                for stream in streams:
                    stream.wait_stream(last)
                    with stream:
                        each.pack()
                    last = stream
        torch.accelerator.current_stream().wait_stream(last)
    assert extension.take_uploads() == 36
    for each in packed:
        each.check()


def test_a_table_is_used_on_one_stream() -> None:
    fake_device.run_ranks(_has_tables_for_each_stream, 1)
