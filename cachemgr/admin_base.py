"""What the parts of the admin service share: the daemon's objects, and the checks that more than one part makes.

Invariant: nothing is half done: a call that is refused changed nothing. The parts (`admin_pool.py`, `admin_tenants.py`,
`admin_prefixes.py`, `admin_scopes.py`, `admin_events.py`) are classes of methods over this one; `admin.py` puts them
together. All run on the daemon's one event loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cachemgr.clocks import Clocks
from cachemgr.events import EventLog
from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from cachemgr.pool_owner import PoolOwner
from cachemgr.sessions import Sessions
from cachemgr.tenant_keys import check_tenant_name
from cachemgr.tenants import Tenants
from common.errors import InvalidArgument, NotFound
from common.logs import get_logger
from common.tokens import pack_tokens

MAX_TOKEN: Final = 2**31 - 1
MAX_SECONDS: Final = 100 * 366 * 86_400.0


class AdminBase:
    """One daemon, as its operators reach it."""

    def __init__(self, *, owner: PoolOwner, sessions: Sessions, tenants: Tenants, clocks: Clocks) -> None:
        self._owner = owner
        self._sessions = sessions
        self._tenants = tenants
        self._clocks = clocks
        self._log = get_logger()

    @property
    def _events(self) -> EventLog:
        return self._owner.events

    def _note(self, kind: str, **fields: object) -> None:
        """Logs what an operator changed, for people and for subscribers: `tenant` and what else there is."""
        self._log.info(kind, **fields)
        tenant = str(fields.pop("tenant", ""))
        self._events.add(kind, self._clocks.steady_ns(), tenant=tenant, detail=fields)

    def _manager_now(self) -> CacheManager | None:
        """The manager, told what time it is; None before the first attach."""
        manager = self._owner.manager
        if manager is not None:
            manager.note_time(self._clocks.steady_ns())
        return manager

    def _known_tenant(self, name: str) -> TenantId:
        """The tenant of a request. Raises InvalidArgument or NotFound."""
        tenant = check_tenant_name(name)
        if not self._tenants.has_tenant(tenant):
            raise NotFound("there is no such tenant", reason="TENANT_NOT_FOUND")
        return tenant

    def _tenant_asked(self, name: str) -> TenantId | None:
        """The tenant of a filter; None means all. Raises InvalidArgument or NotFound."""
        return self._known_tenant(name) if name else None


def tokens_asked(token_ids: Sequence[int]) -> bytes:
    """Token ids of a request as packed int32. Raises InvalidArgument where there is none, or one that is no token."""
    if not token_ids:
        raise InvalidArgument("token_ids", "is empty; a prefix has at least one token")
    for index, token in enumerate(token_ids):
        if not 0 <= token <= MAX_TOKEN:
            raise InvalidArgument(f"token_ids[{index}]", f"is {token}; allowed is 0..{MAX_TOKEN}")
    return pack_tokens(token_ids)


def seconds_asked(field: str, seconds: float, *, most: float = MAX_SECONDS) -> float:
    """A time of a request, more than 0. Raises InvalidArgument."""
    if not (math.isfinite(seconds) and 0 < seconds <= most):
        raise InvalidArgument(field, f"is {seconds:g}; allowed is more than 0, at most {most:.0f} seconds")
    return seconds
