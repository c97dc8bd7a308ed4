"""What must hold after every step of the manager, and when everything has ended.

Numbers are those of the design's list. 1, 2, 4, 6 are recounted by `check_integrity`; the others are seen from outside:
by the shadow memory, the decoders and the clients. It reads the manager's structures and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cachemgr.adoption import LIMBO
from cachemgr.blocks import BlockState
from cachemgr.ids import BlockRun, LeaseId, NodeId, SessionId
from cachemgr.state import CacheState
from common.tokens import unpack_tokens
from tests.simulation.kernel import Violation
from tests.simulation.memory import cells_of, fits, root_cell
from tests.simulation.workload import SCOPE_NAMES

if TYPE_CHECKING:
    from tests.simulation.decoder import SimDecoder
    from tests.simulation.sequences import Sequence
    from tests.simulation.world import World

ACTIVE, CACHED, QUARANTINED = int(BlockState.ACTIVE), int(BlockState.CACHED), int(BlockState.QUARANTINED)


def tenant_number(name: str) -> int:
    """The number in the memory of an owner's name."""
    for number, scope in SCOPE_NAMES.items():
        if name == scope:
            return number
    return int(name.rpartition("-")[2])


class Invariants:
    """The judge of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._published = np.zeros(world.scenario.num_blocks + 1, np.int64)
        self._generation = np.zeros(world.scenario.num_blocks + 1, np.int64)
        self._windows = np.zeros(world.scenario.num_blocks + 1, np.int64)
        self._claimed: dict[int, int] = {}
        self.recount = True  # whether `check_integrity` is asked; off, the shadow memory judges alone

    @property
    def _state(self) -> CacheState:
        return self._world.daemon.manager._state

    def forget(self) -> None:
        """A new manager: all that it lists is looked at anew."""
        self._published[:] = 0
        self._windows[:] = 0
        self._generation = self._state.pool.generation.copy()

    def after_step(self) -> None:
        """Invariants 1 to 7."""
        found = self._world.daemon.manager.check_integrity() if self.recount else []
        if found:
            raise Violation("; ".join(found))
        self._check_published()
        if self._world.scenario.group_window:
            self._check_windows()
        if (self._state.pool.generation != self._generation).any():
            raise Violation("a generation is not the number of times that its block was freed")
        if self._world.scenario.quotas:
            charged = self.charged()
            for tenant, quota in enumerate(self._world.scenario.quotas, 1):
                most = max(quota.ceiling_blocks, self._claimed.get(tenant, 0))
                if quota.ceiling_blocks and charged.get(tenant, 0) > most:
                    raise Violation(f"tenant-{tenant} has {charged[tenant]} blocks, above {quota.ceiling_blocks}")
        counters = self._state.counters
        if counters.hits + counters.misses != self._world.daemon.admitted:
            raise Violation(
                f"{self._world.daemon.admitted} admissions were counted {counters.hits + counters.misses} times"
            )

    def _check_published(self) -> None:
        """5: what the index lists is written, by its owner, and is what the index says."""
        pool, memory = self._state.pool, self._world.memory
        now = np.where(pool.published, pool.generation + 1, 0)
        for block in np.flatnonzero((now != self._published) & pool.published).tolist():
            if not all(map(fits, memory.blocks[block], self._cells(block))):
                raise Violation(f"block {block} is published and does not hold what the index says")
        self._published = now

    def _cells(self, block: int) -> list[int]:
        """What a published block must hold by the index."""
        state = self._state
        forest = state.index.forest
        node = forest.nodes[NodeId(int(forest.node_of[block]))]
        path, step = [], node
        while step is not None:
            path.append(step.edge)
            step = step.tree.anchor if step.parent is None else step.parent
        tokens = unpack_tokens(b"".join(reversed(path))).tolist()
        owner = tenant_number(state.tenant_names[node.tree.owner])
        cells = cells_of(root_cell(owner, node.tree.base_key), tokens)
        start = int(forest.position[block]) * state.block_tokens
        return cells[start : start + state.block_tokens]

    def _check_windows(self) -> None:
        """5, of window blocks: those of published blocks hold what the index says."""
        windows, pool = self._state.window_blocks, self._state.pool
        assert windows is not None
        now = np.where(pool.published & (windows.of > 0), (pool.generation << 20) + windows.of, 0)
        for block in np.flatnonzero((now != self._windows) & (now > 0)).tolist():
            window = int(windows.of[block])
            if not all(map(fits, self._world.windows.blocks[window], self._cells(block))):
                raise Violation(f"window block {window} of the published block {block} holds something else")
        self._windows = now

    def freed(self, blocks: BlockRun) -> None:
        """The manager says that it has freed these."""
        self._generation[blocks] += 1
        self._world.memory.freed(blocks)

    def windows_freed(self, window_blocks: BlockRun) -> None:
        """The manager says that it has freed these."""
        self._world.windows.freed(window_blocks)

    def may_lack_window_blocks(self, needed: int) -> None:
        """9: an acquire was refused so many window blocks: they must not be there, beside what its own window reads."""
        scenario, state = self._world.scenario, self._state
        size, window, windows = scenario.block_tokens, scenario.group_window, state.window_blocks
        assert windows is not None
        runs: list[set[int]] = [set(session.credit) for session in state.book.sessions.values()]
        runs += [set(item.blocks.tolist()) for session in state.book.sessions.values() for item in session.deferred]
        runs += [set(blocks.tolist()) for blocks in state.book.quarantine.values()]
        for lease in state.book.leases.values():
            known = lease.sealed if lease.copy is None else lease.granted
            runs.append(set(lease.blocks[max(0, known + 1 - window) // size :].tolist()))
            runs.append(set() if lease.copy is None else {lease.copy.source})
        runs += [set(pin.blocks.tolist()) for pin in state.pins.values()]
        kept = set().union(*runs)
        taken = sum(windows.of[block] > 0 for block in kept)
        reach = (window + size - 2) // size + 2
        if not scenario.quotas and needed + reach < windows.num_window_blocks - taken:
            raise Violation(f"{needed} window blocks were refused, and {taken} are needed by others")

    def unpublished(self, leases: list[LeaseId]) -> list[tuple[int, int]]:
        """(block, generation) of what these leases hold and the index does not list."""
        pool, book = self._state.pool, self._state.book
        tables = [book.leases[lease].blocks for lease in leases if lease in book.leases]
        return [(b, int(pool.generation[b])) for table in tables for b in table.tolist() if not pool.published[b]]

    def stayed_unpublished(self, blocks: list[tuple[int, int]]) -> None:
        """Leases that must not be stored have published nothing."""
        pool = self._state.pool
        for block, generation in blocks:
            if pool.published[block] and pool.generation[block] == generation:
                raise Violation(f"block {block} of a request that must not be stored is published")

    def claimed(self) -> None:
        """A decoder has claimed what it holds: that may be above a ceiling, for it grew while no daemon was there."""
        self._claimed = self.charged()

    def charged(self) -> dict[int, int]:
        """Active and cached blocks of each tenant, counted from the columns."""
        pool, names = self._state.pool, self._state.tenant_names
        used = (pool.state == ACTIVE) | (pool.state == CACHED)
        return {
            tenant_number(names[owner]): n for owner, n in enumerate(np.bincount(pool.owner[used]).tolist()) if owner
        }

    def kept_of_floors(self) -> dict[int, int]:
        """What each tenant must keep, whatever others need: what it has up to its floor, but for tails below blocks of
        a wider scope that only kept branches hold: those blocks count as room, and are out of reach until tails went.
        """
        state, charged = self._state, self.charged()
        found = {n: min(charged.get(n, 0), q.floor_blocks) for n, q in enumerate(self._world.scenario.quotas, 1)}
        for node in state.index.forest.nodes.values():
            tenant = tenant_number(state.tenant_names[node.tree.owner])
            if node.tree.anchor is not None and tenant in found:
                holds = state.kept.holds[node.blocks]
                found[tenant] -= int(np.count_nonzero(state.pool.references[node.blocks] == holds + 1))
        return found

    def kept_floors(self, before: dict[int, int], actor: int) -> None:
        """8: an acquire of `actor` has pushed nobody else below a floor; `before` is `kept_of_floors`."""
        after = self.charged()
        for tenant, kept in before.items():
            if tenant != actor and after.get(tenant, 0) < kept:
                raise Violation(f"tenant-{tenant} has {after.get(tenant, 0)} blocks, and was to keep {kept}")

    def may_be_refused(self, num_blocks: int) -> None:
        """9: an acquire of so many blocks was refused: it must not fit now."""
        pool = self._state.pool
        if num_blocks <= pool.num_free + pool.num_cached:
            raise Violation(f"{num_blocks} blocks were refused; {pool.num_free} are free, {pool.num_cached} cached")

    def may_be_refused_for_good(self, num_blocks: int, owner: int) -> None:
        """9: an acquire of so many blocks was refused for good: pins and the floors of others must keep too many."""
        quotas = self._world.scenario.quotas
        floors = sum(quota.floor_blocks for number, quota in enumerate(quotas, 1) if number != owner)
        pinned = len({int(block) for pin in self._state.pins.values() for block in pin.blocks})
        if num_blocks <= self._state.pool.num_blocks - floors - pinned:
            raise Violation(f"{num_blocks} blocks were refused for good; floors keep {floors}, pins {pinned}")

    def may_write(self, process: SimDecoder, sequence: Sequence, block: int) -> None:
        """3, and fencing: a block is written by one who holds it alone, or lies in the quarantine of the writer."""
        if self._world.daemon.is_dead:
            return
        pool, book = self._state.pool, self._state.book
        attached = self._session_of(process)
        if attached is None:
            if block in book.quarantine.get(LIMBO, ()):
                return
            raise Violation(f"{process.name} writes block {block}, which is not in limbo, under the daemon before")
        who = f"{process.name} for {sequence.name}"
        state = int(pool.state[block])
        if pool.published[block] or state not in (ACTIVE, QUARANTINED):
            raise Violation(f"{who} writes block {block}, which is {BlockState(state).name}")
        session = book.sessions.get(attached)
        if state == QUARANTINED:
            if attached in book.quarantine and block in book.quarantine[attached]:
                return
            raise Violation(f"{who} writes block {block}, which is in the quarantine of another")
        if session is None:
            raise Violation(f"{who} writes block {block} of a session that is over")
        tables = [item for item in book.leases.values() if block in item.blocks]
        own = len(tables) == 1 and tables[0].session_id == attached
        if process.epoch == self._world.daemon.epoch:
            own = own and tables[0].lease_id == sequence.lease
        deferred = any(block in item.blocks for item in session.deferred)
        if not (own or (not tables and (block in session.credit or deferred))):
            raise Violation(f"{who} writes block {block}, which it does not hold alone")

    def may_write_window(self, process: SimDecoder, sequence: Sequence, block: int, window: int, position: int) -> None:
        """3, of window blocks: a decoder writes the one that a block has, and nothing of another tenant is in it."""
        who = f"{process.name} for {sequence.name}"
        if not window:
            raise Violation(f"{who} was told no window block of block {block}")
        owner = sequence.scope if position < sequence.prefix_tokens else sequence.request.owner
        if self._world.windows.strangers(window, owner):
            raise Violation(f"{who}: window block {window} holds what another tenant left")
        windows = self._state.window_blocks
        if windows is None or self._world.daemon.is_dead or self._session_of(process) is None:
            return
        if windows.of[block] != window:
            raise Violation(f"{who} writes window block {window}, which block {block} does not have")

    def _session_of(self, process: SimDecoder) -> SessionId | None:
        """The session of a process under the daemon that is there now; None where it has not claimed one yet."""
        if process.epoch == self._world.daemon.epoch:
            return process.session
        return self._world.daemon.claimed.get(process.process_id)

    def has_lapsed_nobody(self) -> None:
        """6: whoever's deadline has passed is gone after a tick."""
        for number, session in self._state.book.sessions.items():
            if session.deadline_ns <= self._world.kernel.now_ns:
                raise Violation(f"session {number} lives on after its deadline")

    def is_attached(self, process: SimDecoder) -> None:
        """6: whoever believes by its own clock that its session lives is right."""
        if self._world.daemon.is_dead:
            return
        attached = self._session_of(process)
        if attached not in self._state.book.sessions and not (attached is None and self._state.frozen):
            raise Violation(f"{process.name} works on for session {process.session}, which is over")

    def is_scrubbed(self, process: SimDecoder, sequence: Sequence, block: int, position: int) -> None:
        """Nothing of another tenant is left in a block that a sequence begins to use."""
        owner = sequence.scope if position < sequence.prefix_tokens else sequence.request.owner
        if self._world.memory.strangers(block, owner):
            raise Violation(f"{process.name} for {sequence.name}: block {block} holds what another tenant left")

    # ---- the end

    def is_drained(self) -> bool:
        """10: no lease, nothing active, nothing in quarantine."""
        shot = self._world.daemon.manager.snapshot()
        if self._world.daemon.manager.adopting:
            return False
        return shot.leases == shot.active_blocks == shot.quarantined_blocks == 0

    def say_what_is_left(self) -> None:
        """Raises."""
        shot = self._world.daemon.manager.snapshot()
        raise Violation(
            f"after draining: {shot.leases} leases, {shot.active_blocks} active, {shot.quarantined_blocks} quarantined"
        )

    def at_end(self) -> None:
        """9 and 10, and that every answer was the one of a node that serves nothing else."""
        world = self._world
        self.after_step()
        for request in world.workload.requests:
            if request.ended == "complete":
                for sample in range(request.samples):
                    if request.outputs[sample] != request.solo(sample):
                        raise Violation(f"r{request.number}.{sample} is not what it is alone")
            elif request.ended.startswith("refused"):
                most = len(request.prompt) + request.max_tokens
                if world.may_fit(request, most) and not (world.scenario.quotas and "QUOTA" in request.ended):
                    raise Violation(f"r{request.number} was {request.ended}, and would have fitted")
            elif request.ended not in ("cancelled", "failed: the decoder lied"):
                raise Violation(f"r{request.number} ended: {request.ended}")
        manager = world.daemon.manager
        pages = (manager.list_blocks, manager.list_prefixes, manager.list_leases, manager.list_sessions)
        for page in pages:
            page(limit=1000)
        manager.tick(world.kernel.now_ns + 10**12)  # every kept branch is over
        for pin in manager.list_pins(limit=100).items:
            manager.unpin(pin.pin)
        manager.evict(everything=True)
        self.after_step()
        shot = manager.snapshot()
        if shot.free_blocks != shot.total_blocks or self._state.index.forest.trees:
            raise Violation(f"an empty cache has {shot.free_blocks} of {shot.total_blocks} blocks free")
