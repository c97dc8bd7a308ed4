"""`python -m decoder`: one decoder process. Reads its options, sets the threads' environment, serves until SIGTERM.

The libraries that compute are imported only after their environment is set: several processes share the cores, so
their threads must wait passively.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

from common.config import build_parser, load_options
from common.logs import configure_logs
from common.serving import EXIT_USAGE, run_service

PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def set_thread_environment(environ: MutableMapping[str, str], threads: int) -> None:
    """Make compute threads wait without spinning, `threads` of them (0: every core). What is set already stays."""
    for name, value in PASSIVE_THREADS.items():
        environ.setdefault(name, value)
    count = str(threads or len(os.sched_getaffinity(0)))
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environ.setdefault(name, count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the decoder; the exit status."""
    namespace = build_parser("decoder").parse_args(arguments)
    try:
        options = load_options(namespace, os.environ)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    configure_logs(f"decoder-{options.decoder_index}", options.log_level)
    os.umask(0o077)
    set_thread_environment(os.environ, options.threads)
    if options.faults.interpreted_kernels:
        os.environ["TRITON_INTERPRET"] = "1"
    from decoder.loading import leave  # imports torch and numba, which read the environment once
    from decoder.process import serve

    return leave(run_service(lambda stop: serve(options, stop)))


if __name__ == "__main__":
    sys.exit(main())
