"""These tests compile kernels ahead. `tests/kernels/test_ahead_of_time.py` starts them in a process of their own, since
the compiler must be imported without the interpreter, and has much to say when its process ends."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TESSERA_TEST_COMPILE") == "1" else ["test_*.py"]
