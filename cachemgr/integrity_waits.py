"""The check of waits: who computes for others, where that is found, and who waits for it. It changes nothing.

Part of the full check of `integrity.py`. Messages name leases and sessions by number, never tokens or tenants.
"""

from __future__ import annotations

from cachemgr.state import CacheState


def check_waits(state: CacheState, found: list[str]) -> None:
    """Every invariant of `waiting.py`: a producer lives, may publish, has something left, and is found in its place."""
    waits, book = state.waits, state.book
    places: set[tuple[int, int]] = set()
    for number, producer in waits.producers.items():
        lease = producer.lease
        if book.leases.get(number) is not lease:
            found.append(f"lease {number}: it is waited for and has ended")
            continue
        grows = state.window_tokens or state.window_blocks is not None  # its table may begin with less
        reach = lease.num_tokens // state.block_tokens if grows else lease.num_blocks
        if not lease.store or lease.num_published >= producer.until or reach < producer.until:
            found.append(f"lease {number}: it is waited for and has nothing to publish")
        if any(blocks <= lease.num_published for _, blocks in producer.waits.values()):
            found.append(f"lease {number}: what is waited for is published, and nobody was told")
        if any(waiter[0] not in book.sessions for waiter in producer.waits):
            found.append(f"lease {number}: a session that is over waits for it")
        places |= {(number, id(key[0])) for key in producer.keys}
    listed = {(number, id(key[0])) for key, bucket in waits.found.items() for number in bucket}
    if listed != places or any(not bucket for bucket in waits.found.values()):
        found.append("where producers are found is not where they are")
