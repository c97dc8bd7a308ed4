"""What the first start of a node makes: the internal, admin and reader credentials, the default tenant and its key.

Invariant: every credential file is 0600 from its first byte and is never overwritten; a file that others could read
ends the start. The key file is written before the database knows the key, and adopted where a start was cut off in
between. Called once by the daemon, under the lock of the state directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cachemgr.tenant_keys import new_key
from cachemgr.tenants import DEFAULT_TENANT, Tenants
from common.credentials import new_secret, read_secret, write_secret
from common.logs import get_logger
from common.paths import StatePaths


@dataclass(frozen=True, slots=True)
class NodeSecrets:
    """The credentials that the daemon's own servers ask for."""

    internal: str = field(repr=False)
    admin: str = field(repr=False)
    reader: str = field(repr=False)


def ensure_secrets(paths: StatePaths) -> NodeSecrets:
    """Make what is absent, read all. Raises FailedPrecondition on an unsafe or empty file."""
    for path, prefix in ((paths.internal_key, "tsi"), (paths.admin_key, "tsa"), (paths.reader_key, "tsv")):
        if write_secret(path, new_secret(prefix)):
            get_logger().info("credential_created", file=path.name)
    return NodeSecrets(
        internal=read_secret(paths.internal_key),
        admin=read_secret(paths.admin_key),
        reader=read_secret(paths.reader_key),
    )


def ensure_default_tenant(tenants: Tenants, paths: StatePaths, *, now_ns: int, show: Callable[[str], object]) -> None:
    """Make the default tenant and its key on an empty database; `show` is given the key, this one time.

    Raises FailedPrecondition where the key's file is unsafe or holds no key of ours.
    """
    if not tenants.empty:
        if paths.default_key.exists():
            read_secret(paths.default_key)  # refuses a mode wider than 0600
        else:
            get_logger().warning(
                "default_key_missing", file=paths.default_key.name, remedy="tessera admin create-key default"
            )
        return
    _, fresh = new_key()
    created = write_secret(paths.default_key, fresh)
    key = read_secret(paths.default_key)
    identity = tenants.create_tenant_with_key(DEFAULT_TENANT, key, "default", now_ns)
    get_logger().info("tenant_created", tenant=identity.tenant, key_id=identity.key_id)
    if created:
        show(key)
