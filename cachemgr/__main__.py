"""`python -m cachemgr`: the cache manager's process. Reads its options, runs the daemon until SIGTERM, drains, ends.

It imports neither the model's nor the kernels' libraries, so that it is up within a second.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from cachemgr.arena.maker import open_place
from cachemgr.daemon import Daemon
from cachemgr.heap import give_large_arrays_back
from common.config import Options, build_parser, load_options
from common.logs import configure_logs
from common.serving import EXIT_USAGE, run_service, settle_heap


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon; the exit status."""
    namespace = build_parser("cachemgr").parse_args(arguments)
    try:
        options = load_options(namespace, os.environ)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    configure_logs("cachemgr", options.log_level)
    os.umask(0o077)
    give_large_arrays_back()
    return run_service(lambda stop: serve(options, stop))


async def serve(options: Options, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain and end."""
    daemon = Daemon(options, show_key=_show_key, place=open_place(options, os.environ))
    try:
        await daemon.start()
        settle_heap()
        await stop.wait()
        await daemon.drain(options.drain_seconds)
    finally:
        await daemon.stop()


def _show_key(key: str) -> None:
    """Show a fresh key to whoever started us."""
    if not sys.stderr.isatty():  # where stderr is a log file, the key would stay in it
        return
    sys.stderr.write(f"the default tenant's key, shown this once (also in default.key): {key}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
