"""What happens to the engine's books while the stream to the cache manager is broken, and when it is whole again.

Invariant: between `leave` and `come_back` nothing is sent and nothing is waited for: sequences go on with the blocks
and the credit that are here, and whatever was on its way is asked for again later. Called by the engine's thread
between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from common.logs import get_logger
from decoder.beams import groups_of
from decoder.cache_api import Arena, CacheClient, Growth, Replacement, Resumed
from decoder.commit import Committer
from decoder.grouped_arena import GroupedArena
from decoder.holdings import Held, Holdings
from decoder.reporting import Reporter
from decoder.scheduler import Scheduler
from decoder.sequence import IntArray
from decoder.windows import Windows


class Absence:
    """Knows whether the stream is broken. `leave` may be called again before `come_back`."""

    def __init__(self, client: CacheClient, scheduler: Scheduler, reporter: Reporter, committer: Committer) -> None:
        self.is_away = False
        self._client = client
        self._scheduler = scheduler
        self._reporter = reporter
        self._committer = committer
        self._log = get_logger()

    def leave(self, session: int, number: int, arena: Arena | None) -> None:
        """The stream broke: present what is held of `arena`; what was asked for and not answered waits."""
        self.is_away = True
        self._scheduler.queue.recall()
        self._scheduler.credit.leave()
        self._committer.recall_forks()
        self._reporter.leave()
        held = self._reporter.present(self._scheduler.running)
        credit = self._scheduler.credit.blocks
        holdings = Holdings(held, credit, number)
        if isinstance(arena, GroupedArena):
            needed = needed_blocks(held, self._scheduler.windows)
            holdings = replace(holdings, window_blocks=arena.pairs_of(np.concatenate([credit, needed])))
        self._client.present(session, holdings)

    def come_back(self, message: Resumed) -> None:
        """The session goes on: old leases get their new ids, and sequences whose lease was not kept wait again."""
        self.is_away = False
        lost = []
        for sequence in list(self._scheduler.running):
            lease = None if sequence.lease is None else message.leases.get(sequence.lease)
            if lease is None:
                self._scheduler.requeue(sequence)
                lost.append(sequence)
            else:
                sequence.lease = lease
        self._scheduler.credit.come_back()
        self._reporter.come_back(message.leases, message.revision)
        self._committer.keeping.rename(message.leases)
        self._committer.beams.restart(groups_of(lost))
        replace_blocks(self._scheduler, message.replacements)
        self._log.info("session_resumed", session=message.session, leases=len(message.leases))

    def end(self) -> None:
        """The session is over."""
        self.is_away = False


def needed_blocks(held: Iterable[Held], windows: Windows) -> IntArray:
    """The blocks that the windows of sequences have not passed, and those of their copies, int32."""
    blocks = [np.empty(0, np.int32)]
    for sequence in held:
        blocks.append(sequence.blocks[windows.passed_by(sequence.sealed_tokens) :])
        if sequence.copy is not None:
            blocks.append(np.array([sequence.copy.source, sequence.copy.target], np.int32))
    return np.concatenate(blocks)


def replace_blocks(scheduler: Scheduler, replacements: Iterable[Replacement]) -> None:
    """Use published blocks in place of duplicates. A lease that has ended meanwhile is passed by."""
    holders = {sequence.lease: sequence for sequence in scheduler.running}
    for replacement in replacements:
        holder = holders.get(replacement.lease)
        if holder is not None:
            holder.replace_blocks(replacement.first_index, replacement.blocks)


def grow_tables(scheduler: Scheduler, grown: Iterable[Growth]) -> None:
    """Puts credit that came for single sequences into their tables. That of a sequence which is over goes back."""
    holders = {sequence.lease: sequence for sequence in scheduler.running}
    for growth in grown:
        holder, blocks = holders.get(growth.lease), growth.blocks.tolist()
        if holder is None:
            scheduler.credit.send_back(blocks)
            continue
        for block in blocks:
            holder.append_block(block)
