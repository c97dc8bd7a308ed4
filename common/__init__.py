"""What every process of a node shares. Importing it sets what gRPC's core reads once, when `grpc` is first imported:
each entry point imports this package before that.

Its event engine hands every message from thread to thread of a pool; without it, who waits for an answer polls the
socket itself, and a round trip takes about three quarters of the time. A value that is there already stays.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
