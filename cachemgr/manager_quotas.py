"""The cache manager's door to quotas, pins, priorities and what is to be scrubbed.

`CacheManager` inherits it, so that it stays the one door. A call that raises has changed nothing. Called by the admin
service and, for `take_scrub`, by the session service.
"""

from __future__ import annotations

import heapq

from cachemgr import pins
from cachemgr.ids import BlockArray, TenantId
from cachemgr.leases import to_wire
from cachemgr.manager_state import ManagerState
from cachemgr.nodes import NEVER
from cachemgr.quotas import Quota, QuotaUsage
from cachemgr.results import ScopeSpan
from cachemgr.views import Page, PinView


class ManagerQuotas(ManagerState):
    """What an operator may set for a tenant."""

    def set_quota(self, tenant: TenantId, quota: Quota) -> None:
        """Sets what a tenant may have. What it has above a new ceiling stays until it, or somebody else, needs room.

        Raises InvalidArgument for numbers that no pool could keep, ResourceExhausted (FLOORS_EXCEED_POOL) where the
        floors of all tenants would not fit.
        """
        quota.check()
        self._state.quotas.set(self._state.owner_of(tenant), quota)
        self._state.revision += 1

    def quota_usage(self, tenant: TenantId) -> QuotaUsage:
        """What a tenant may have, and has."""
        return self._state.quotas.usage(self._state.known_owner(tenant))

    def pin(
        self,
        tenant: TenantId,
        *,
        root: bytes,
        tokens: bytes,
        now_ns: int,
        ttl_ns: int | None = None,
        prefix: ScopeSpan | None = None,
    ) -> PinView:
        """Keeps what is resident of a prefix (packed tokens) from eviction, for `ttl_ns` or until `unpin`: also what of
        it lies in the wider scope that `prefix` names, if one is.

        Raises NotFound where nothing is resident, ResourceExhausted (PIN_BUDGET_EXCEEDED), InvalidArgument.
        """
        return self._view(pins.pin(self._state, tenant, root, tokens, now_ns, ttl_ns, prefix))

    def unpin(self, pin_id: int) -> None:
        """Ends a pin. Raises NotFound."""
        pins.unpin(self._state, pin_id)

    def list_pins(self, after: int = 0, limit: int = 100) -> Page[PinView]:
        """Pins by id."""
        chosen = heapq.nsmallest(limit + 1, (number for number in self._state.pins if number > after))
        shown = chosen[:limit]
        return Page([self._view(self._state.pins[number]) for number in shown], shown[-1] if len(chosen) > limit else 0)

    def count_pinned(self, tenant: TenantId | None = None) -> int:
        """Distinct blocks that the pins of a tenant, or of all, keep."""
        owner = None if tenant is None else self._state.known_owner(tenant)
        return len(pins.pinned_blocks(self._state, owner))

    def set_priority(
        self, tenant: TenantId, *, root: bytes, tokens: bytes, priority: int, prefix: ScopeSpan | None = None
    ) -> int:
        """Sets the priority (0..100) of what is resident of a prefix, in whole blocks; returns how many tokens that is.
        What of it lies in the wider scope that `prefix` names is everybody's who shares it. A later use with a higher
        one raises it again. Raises NotFound where nothing is resident, InvalidArgument."""
        return pins.set_priority(self._state, tenant, root, tokens, priority, prefix)

    def take_scrub(self) -> BlockArray:
        """Blocks (int32) handed out since the last call that hold another owner's keys and values: whoever got them is
        told to zero them before anything else touches them. To be called after each operation of a session."""
        return to_wire(self._core.take_scrub())

    def _view(self, pin: pins.Pin) -> PinView:
        return PinView(
            pin=pin.pin_id,
            tenant=self._state.tenant_names[pin.owner],
            num_tokens=pin.num_tokens,
            num_blocks=len(pin.blocks),
            expires_ns=None if pin.expires_ns == NEVER else pin.expires_ns,
        )
