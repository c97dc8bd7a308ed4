"""What a start that is refused leaves behind: no state directory that it made itself.

Invariant: a folder that was there before, one in which anything lies that a start does not make, and one that somebody
changed through the admin RPC meanwhile, stay as they are. Called by `up`, which holds the lock of the directory.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Final

from cli.errors import CommandError
from cli.node import Node
from cli.node_lock import SUPERVISOR_LOCK

SQLITE_BESIDE: Final = ("-wal", "-shm", "-journal")


class FreshState:
    """The folders of a state directory, of which it knows those that it made."""

    def __init__(self, node: Node) -> None:
        """Make the folders. Raises CommandError where that cannot be, with none of them left."""
        paths = self._paths = node.paths
        folders = (paths.state_dir, *paths.state_dir.parents)
        self._made = [folder for folder in folders if not folder.exists()]  # the innermost first
        try:
            node.prepare()
        except CommandError:
            self.remove()
            raise

    def remove(self) -> bool:
        """Take away what was made; whether the state directory is gone."""
        if self._paths.state_dir not in self._made or not self._is_untouched():
            return False
        shutil.rmtree(self._paths.state_dir, ignore_errors=True)
        for folder in self._made[1:]:
            with contextlib.suppress(OSError):  # others put something there
                folder.rmdir()
        return not self._paths.state_dir.exists()

    def _is_untouched(self) -> bool:
        paths = self._paths
        made_by_a_start = (
            paths.run_dir, paths.logs_dir, paths.default_key, paths.admin_key, paths.reader_key, paths.internal_key,
            paths.lock_file, paths.tenants_db, *(Path(f"{paths.tenants_db}{end}") for end in SQLITE_BESIDE),
            paths.state_dir / SUPERVISOR_LOCK,
        )  # fmt: skip
        return paths.state_dir.is_dir() and set(paths.state_dir.iterdir()) <= set(made_by_a_start)
