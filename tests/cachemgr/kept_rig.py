"""The core's rig with kept branches: what they must read stands in the pretend arena, as for any sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cachemgr.ids import TenantId
from cachemgr.results import Keep, Reported
from tests.cachemgr.core_rig import Rig, Running, pack, root_of

SECOND = 10**9


class KeptRig(Rig):
    """A rig whose sequences may be kept under names, and continued."""

    def keep(self, sequence: Running, name: bytes, *, ttl_ns: int = SECOND, now_ns: int = 0) -> Reported:
        """Computes all but the newest token of a sequence, and releases it as a kept branch."""
        self.compute(sequence)
        message = self.message(sequence, release=True)._replace(keep=Keep(name, ttl_ns))
        answer = self.manager.report(
            sequence.session, [message], returned=np.zeros(0, np.int32), wanted=0,
            applied_revision=self.revision[sequence.session], now_ns=now_ns,
        )  # fmt: skip
        self.sequences.remove(sequence)
        self.revision[sequence.session] = self.manager.revision
        return answer

    def kept(
        self, tokens: Sequence[int], name: bytes, *, tenant: str = "a", no_store: bool = False, **when: int
    ) -> None:
        """A whole sequence that becomes a kept branch."""
        answer = self.keep(self.acquire(tokens, tenant=tenant, no_store=no_store), name, **when)
        assert answer.refusals == []

    def resume(
        self, name: bytes, tokens: Sequence[int] = (), *, base_tokens: int = 0, tenant: str = "a", now_ns: int = 0,
        **options: Any,
    ) -> Running:  # fmt: skip
        """A lease that continues a branch; all of it is known to the manager."""
        session = options.pop("session", self.session)
        answer = self.manager.acquire(
            session, tenant=TenantId(tenant), root=options.pop("root", root_of(tenant)), tokens=pack(tokens),
            request_id="request", sample=0, base=name, base_tokens=base_tokens, now_ns=now_ns, **options,
        )  # fmt: skip
        known = [*np.frombuffer(answer.base_tokens, "<i4").tolist(), *tokens]
        sequence = Running(
            session, answer.lease_id, tenant, known, answer.blocks.tolist(), answer.cached_tokens, answer.copy
        )
        sequence.reported = len(known)
        self.sequences.append(sequence)
        return sequence

    def drop(self, name: bytes, tenant: str = "a", now_ns: int = 0) -> None:
        """Ends a branch."""
        self.manager.drop_kept(TenantId(tenant), name, now_ns=now_ns)

    @property
    def branches(self) -> list[int]:
        """How many tokens each kept branch has, oldest first."""
        return [view.num_tokens for view in self.manager.list_branches().items]

    def references(self, block: int) -> int:
        """Holders of a block, plus one if published."""
        return int(self.manager._state.pool.references[block])
