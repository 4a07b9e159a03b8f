"""The ranks that go on together agree in a store."""

from __future__ import annotations

import threading
import time

from torch.distributed import TCPStore

from fastsync.elastic.membership import Members, another_connection
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
