"""`python -m tests.cuda_daemon`: the cache manager's process, with a recorder where its CUDA driver would be.

It takes the options of `python -m cachemgr`.
"""

from __future__ import annotations

import asyncio
import os
import sys

from cachemgr.arena.maker import open_place
from cachemgr.daemon import Daemon
from common.config import build_parser, load_options
from common.logs import configure_logs
from common.serving import run_service
from tests.cuda_recorder import Recorder


def main() -> int:
    """Serve until SIGTERM."""
    options = load_options(build_parser("cachemgr").parse_args(), os.environ)
    configure_logs("cachemgr", options.log_level)

    async def serve(stop: asyncio.Event) -> None:
        daemon = Daemon(options, show_key=lambda key: None, place=open_place(options, os.environ, Recorder))
        try:
            await daemon.start()
            await stop.wait()
        finally:
            await daemon.stop()

    return run_service(serve)


if __name__ == "__main__":
    sys.exit(main())
