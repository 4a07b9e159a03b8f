"""The ranks that go on together agree in a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from torch.distributed import ProcessGroup, TCPStore

from fastsync.elastic.loop import MOST_FAILURES, MembershipLoop
from fastsync.elastic.membership import Members, Membership, another_connection
from fastsync.elastic.peer_watch import PeerWatch


def test_a_rank_that_was_given_up_does_not_seem_to_wait(store: TCPStore) -> None:
    """Its kernel answers for it."""
    watches = [PeerWatch("127.0.0.1", lambda lost: None, lambda: None) for _ in range(2)]
    old, new = (
        Members(another_connection(store), each, watch, timeout=0.5)
        for each, watch in zip((0, 99), watches, strict=True)
    )
    look = another_connection(store)
    old.begin([0])
    joining = threading.Thread(target=new.join, daemon=True)
    joining.start()
    until = time.monotonic() + 30
    while not old.wants_to_change(look):
        assert time.monotonic() < until
    assert old.agree(1, has_ended=False).members == [0, 1]
    joining.join(30)
    assert not joining.is_alive()
    assert old.agree(2, has_ended=False).members == [0], "the new one does not come"
    assert not old.wants_to_change(look)
    for watch in watches:
        watch.close()


def test_a_rank_that_died_while_it_waited_is_looked_for_once(store: TCPStore) -> None:
    watches = [PeerWatch("127.0.0.1", lambda lost: None, lambda: None) for _ in range(2)]
    old, look = Members(another_connection(store), 0, watches[0], timeout=0.5), another_connection(store)
    old.begin([0])
    store.add("joined", 1)
    store.set("address/1", watches[1].address)
    assert old.wants_to_change(look)
    watches[1].close()
    assert not old.wants_to_change(look)
    assert store.get("address/1") == b"", "each look at it would wait for a connection"
    watches[0].close()


# ---- the loop -------------------------------------------------------------------------------------------------------


@pytest.fixture
def loop(store: TCPStore) -> Iterator[MembershipLoop]:
    """That of a training of one rank."""
    made = MembershipLoop(store, 0, timeout=5.0)
    made.members.begin([0])
    yield made
    made.watch.close()


class Share:
    """Raises some errors, one a call, and then does its work."""

    def __init__(self, errors: Sequence[BaseException]) -> None:
        self.errors = list(errors)
        self.epochs: list[int] = []
        self.groups: list[ProcessGroup] = []

    def __call__(self, decided: Membership, group: ProcessGroup) -> None:
        self.epochs.append(decided.epoch)
        self.groups.append(group)
        if self.errors:
            raise self.errors.pop(0)


def test_a_failure_is_tried_again_in_another_group(loop: MembershipLoop) -> None:
    share = Share([RuntimeError("lost"), ValueError("no longer listed")])
    decided = loop.go_on(partial(loop.members.agree, 3, has_ended=False), share)
    assert (decided.epoch, decided.progress) == (3, {0: 3})
    assert share.epochs == [1, 2, 3]
    assert len({*map(id, share.groups)}) == 3


def test_failures_that_do_not_end_are_an_error_of_the_last(loop: MembershipLoop) -> None:
    errors = [RuntimeError(str(number)) for number in range(9)]
    share = Share(errors)
    with pytest.raises(RuntimeError, match="could not go on together") as raised:
        loop.go_on(partial(loop.members.agree, 0, has_ended=False), share)
    assert len(share.epochs) == 1 + MOST_FAILURES + 1
    assert raised.value.__cause__ is errors[MOST_FAILURES + 1]


def test_nothing_is_shared_where_all_have_ended(loop: MembershipLoop) -> None:
    share = Share([])
    assert loop.go_on(partial(loop.members.agree, 0, has_ended=True), share).is_over
    assert share.epochs == []


def test_new_ranks_alone_have_no_state_to_go_on_with(loop: MembershipLoop) -> None:
    share = Share([])
    with pytest.raises(RuntimeError, match="all ranks are lost that had"):
        loop.go_on(partial(loop.members.agree, -1, has_ended=False), share)
    assert share.epochs == []


def test_who_fails_in_the_first_membership_may_try_again(loop: MembershipLoop) -> None:
    share = Share([KeyboardInterrupt(), RuntimeError("lost")])
    agree = partial(loop.members.agree, 0, has_ended=False)
    with pytest.raises(KeyboardInterrupt):
        loop.go_on(agree, share, first=loop.members.now)
    assert loop.go_on(agree, share, first=loop.members.now).epoch == 1
    assert share.epochs == [0, 0, 1]


def test_another_error_takes_this_rank_out(loop: MembershipLoop) -> None:
    with pytest.raises(KeyError):
        loop.go_on(partial(loop.members.agree, 0, has_ended=False), Share([KeyError("a fault")]))
    assert not loop.watch._thread.is_alive() or loop.watch._is_closed
