"""AdminService: what operators see and do, and what readers see. Thin: its parts validate, ask the manager or the
tenants, and convert.

Invariant: nothing is half done: a call that is refused changed nothing. Credential and role are checked before any
method is reached (`roles.py`), and each call that may change something is in the audit log (`audit_calls.py`). It never
shows prompt text, secrets, handles or bytes of keys and values.
"""

from __future__ import annotations

from cachemgr.admin_events import EventAdmin
from cachemgr.admin_explain import ExplainAdmin
from cachemgr.admin_pool import PoolAdmin
from cachemgr.admin_prefixes import PrefixAdmin
from cachemgr.admin_scopes import ScopeAdmin
from cachemgr.admin_tenants import TenantAdmin
from tessera.admin.v1 import admin_pb2_grpc


class AdminService(  # type: ignore[misc,unused-ignore]
    PoolAdmin, PrefixAdmin, ExplainAdmin, TenantAdmin, ScopeAdmin, EventAdmin, admin_pb2_grpc.AdminServiceServicer
):
    """All of the admin RPC of one daemon."""
