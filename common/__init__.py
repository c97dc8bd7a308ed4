"""What every process of a node shares. Importing it sets what gRPC's core reads once, when `grpc` is first imported:
each entry point imports this package before that.

Its event engine hands every message from thread to thread of a pool; without it, who waits for an answer polls the
socket itself, and a round trip takes about three quarters of the time. But then nobody polls for a blocking channel
whose calls fail at once while it connects again. Only gRPC's own look at its sockets does, every 5 s by default, and on
a busy machine an attempt, which ends after a second, may miss one after the other. A look costs some 10 us.

A value that is there already stays.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "200")
