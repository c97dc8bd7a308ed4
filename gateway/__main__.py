"""`python -m gateway`: options, logs, one event loop; SIGTERM drains and exits 0."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from common.config import build_parser, load_options
from common.errors import TesseraError
from common.logs import configure_logs
from common.serving import EXIT_USAGE, run_service, settle_heap
from gateway.application import Gateway
from gateway.tokenizer import load_tokenizer


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the gateway until a signal. Returns the exit status: 0 after a drain, 1 if it fails, 2 for bad options."""
    parser = build_parser("gateway")
    try:
        options = load_options(parser.parse_args(arguments), os.environ if environ is None else environ)
        configure_logs("gateway", options.log_level)
        if options.model is None:
            raise ValueError("--model is needed: a GGUF file or a Hugging Face directory")
        tokenizer = load_tokenizer(options.model)
    except (ValueError, TesseraError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE

    os.umask(0o077)

    async def serve(stop: asyncio.Event) -> None:
        gateway = Gateway(options, tokenizer)
        await gateway.start()
        settle_heap()
        try:
            await stop.wait()
        finally:
            await gateway.stop()

    return run_service(serve)


if __name__ == "__main__":
    sys.exit(main())
