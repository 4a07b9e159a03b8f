"""What the errors of a training have in common: data beside their texts."""

from __future__ import annotations

from collections.abc import Iterable


class SyncError(RuntimeError):
    """The ranks of a training cannot go on together, as one is lost or late, or they do not agree.

    The text is made of the same data. What is not known is empty or None.
    """

    ranks: tuple[int, ...]
    """The ranks that it is about, in ascending order: those that are lost, that do not answer, or that differ."""
    step: int | None
    """The number of the step, from 0."""
    bucket: str | None
    """The bucket, or the module under ``fully_shard``."""
    reason: str
    """What has gone wrong, without the way out."""

    def __init__(
        self,
        text: str,
        *,
        ranks: Iterable[int] = (),
        step: int | None = None,
        bucket: str | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(text)
        self.ranks, self.step, self.bucket, self.reason = tuple(sorted(ranks)), step, bucket, reason

    @property
    def rank(self) -> int | None:
        """The rank that it is about; None if it is about none, or about several."""
        return self.ranks[0] if len(self.ranks) == 1 else None


class RanksDifferError(SyncError):
    """The ranks hold different weights, or have averaged gradients that do not belong together.

    Every rank raises it, and none is lost. The text tells ranks and step.
    """


class RankLostError(SyncError):
    """A rank was lost in this step, or its backward has failed. ``Elastic`` catches it, and the step runs again.

    ``fastsync.ppo.train`` raises it if a rank is lost before the training has begun.
    """
