"""A site's steps in ``DiLoCo``, and which step sends which fragment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .fragment import Fragment


class Schedule:
    """The step of a site, from which follows what it sends next. Every fragment is sent once in ``sync_every`` steps.

    At the end of a block, steps are skipped up to those that send the last means.
    """

    def __init__(self, sync_every: int) -> None:
        self.sync_every = sync_every
        self.step = self.num_skipped = 0

    @property
    def num_taken(self) -> int:
        """The steps that the site has taken, or taken over."""
        return self.step - self.num_skipped

    def sends(self, fragment: Fragment) -> bool:
        """Whether this step sends the fragment."""
        return self.step % self.sync_every == fragment.offset

    def next_step_of(self, fragment: Fragment) -> int:
        """Returns the next step that sends the fragment."""
        return self.step + 1 + (fragment.offset - self.step - 1) % self.sync_every

    def next_step(self, fragments: Sequence[Fragment]) -> int:
        """Returns the next step that sends one of these."""
        return min(map(self.next_step_of, fragments))

    def skip_to_next(self, fragments: Sequence[Fragment]) -> Fragment:
        """Goes to the next step that sends one of these, and returns which. Its caller counts what is skipped."""
        fragment = min(fragments, key=self.next_step_of)
        self.step = self.next_step_of(fragment)
        return fragment

    def go_to(self, next_step: int, fragments: Sequence[Fragment]) -> None:
        """Skips steps until ``next_step`` sends next, if an error has ended this site's block earlier than others'."""
        if self.next_step(fragments) < next_step:
            step = max(next_step - 1 - (next_step - 1 - each.offset) % self.sync_every for each in fragments)
            self.num_skipped += step - self.step
            self.step = step
            for fragment in fragments:
                if fragment.under_way is not None and fragment.under_way.due <= step:
                    fragment.under_way = replace(fragment.under_way, due=step + 1)
