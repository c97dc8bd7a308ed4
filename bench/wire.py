"""What does the cache manager cost through its socket? Times a real daemon over a raw session stream; needs no model.

    tessera bench wire [--blocks N] [--published N] [--rounds N] [--json FILE]

Prints how long the daemon takes until it answers, round trips of an acquire, of a report with 64 seals (and with 64
whole blocks) and of nothing (a credit request for no block; beside it the same through a bare stream, which is what
gRPC alone costs), and the daemon's memory before and after its index was filled, at rest: pages of the journal's file
that it does not touch are the kernel's, and are shown as the file's size. The bench asks as a decoder does: on the same
event loop, with its own values, and with a task that waits for the next answer before the question is sent.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench import table
from bench.bare_stream import round_trips
from bench.raw_session import BLOCK_TOKENS, NOTHING, Session
from bench.setting import machine_facts, make_pool_parser
from bench.table import Cell, quantile
from common.credentials import read_secret
from common.paths import StatePaths
from common.rpc import open_channel, unix_target
from common.serving import new_event_loop
from common.tokens import unpack_tokens
from decoder.cache_api import SequenceReport
from decoder.sequence import LeaseId
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc

PROMPT_TOKENS = 8192
SEQUENCES = 64
START_SECONDS = 20.0
REST_SECONDS = 2.5  # the daemon's clock gives memory back once a second


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_pool_parser("wire", __doc__)
    options = parser.parse_args(list(arguments))
    least = PROMPT_TOKENS // BLOCK_TOKENS
    if not least <= options.published <= options.blocks - SEQUENCES * 4:
        parser.error(f"--published is {options.published}; allowed are {least}..{options.blocks - SEQUENCES * 4}")
    report = table.Report("wire", {**machine_facts(), "blocks": options.blocks, "block tokens": BLOCK_TOKENS})
    report.begin()
    with (
        running_daemon(options.blocks) as (paths, process_id, start_seconds),
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        rows, memory = runner.run(measure(paths, process_id, options.published, options.rounds))
    report.table("Round trips of one session", ("operation", "p50 µs", "p99 µs"), rows)
    memory.insert(0, ["start until it answers, s", start_seconds])
    report.table("The daemon", ("what", "value"), memory)
    report.write_json(options.json)
    return 0


@contextmanager
def running_daemon(num_blocks: int) -> Iterator[tuple[StatePaths, int, float]]:
    """A daemon on a state directory of its own: its paths, process id, and seconds until it listened."""
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        command = [sys.executable, "-m", "cachemgr", "--state-dir", folder, "--pool-blocks", str(num_blocks)]
        begun = time.perf_counter()
        process = subprocess.Popen([*command, "--log-level", "warning"], cwd=Path(__file__).parent.parent)
        try:
            paths = StatePaths(Path(folder))
            while not paths.admin_socket.exists():  # bound last
                if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                    raise RuntimeError("the cache manager did not start")
                time.sleep(0.002)
            yield paths, process.pid, time.perf_counter() - begun
        finally:
            process.terminate()
            process.wait()


async def measure(
    paths: StatePaths, process_id: int, published: int, rounds: int
) -> tuple[list[list[Cell]], list[list[Cell]]]:
    """Fill the index through the stream, then time it. Returns the rows of both tables."""
    random = np.random.default_rng(3)

    def fresh(num_tokens: int) -> bytes:
        return random.integers(0, 50_000, num_tokens, dtype=np.int32).tobytes()

    async with open_channel(unix_target(paths.cachemgr_socket), read_secret(paths.internal_key)) as channel:
        stub = cache_pb2_grpc.CredentialServiceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        answer = await stub.Authenticate(cache_pb2.AuthenticateRequest(key=read_secret(paths.default_key)))
        session, grant = Session(channel), answer.grant
        await session.attach()
        before = resident_bytes(process_id)
        prompts = []
        for _ in range(published * BLOCK_TOKENS // PROMPT_TOKENS):
            prompts.append(fresh(PROMPT_TOKENS))
            lease = await session.acquire(grant, prompts[-1])
            await session.report(
                SequenceReport(
                    LeaseId(lease.lease_id), sealed_tokens=PROMPT_TOKENS, copied=lease.HasField("copy"), release=True
                )
            )
        await asyncio.sleep(REST_SECONDS)
        after = resident_bytes(process_id)
        rows: list[list[Cell]] = []

        def add(name: str, times: list[float]) -> None:
            rows.append([name, quantile(times, 0.5), quantile(times, 0.99)])

        add("an empty message through a bare gRPC stream", await round_trips(rounds))
        add("nothing", [await _timed(session.ask(credit=cache_pb2.CreditRequest())) for _ in range(rounds)])
        add("acquire of a resident prompt of 8,192", await _acquires(session, grant, prompts, rounds))
        add(f"{SEQUENCES} seals in one report", await _seals(session, grant, fresh, rounds))
        blocks = await _seals(session, grant, fresh, rounds, at_once=True)
        add(f"{SEQUENCES} whole blocks in one report", blocks[BLOCK_TOKENS - 1 :: BLOCK_TOKENS] or blocks)
        await session.close()
    tokens = len(prompts) * PROMPT_TOKENS
    memory: list[list[Cell]] = [
        ["resident memory at start, MB", before / 1e6],
        [f"resident memory with {tokens // BLOCK_TOKENS:,} blocks published, MB", after / 1e6],
        ["bytes a cached token, its id not counted", (after - before) / tokens - 4],
        ["the journal's file, MB of page cache or disk, not counted above", paths.index_journal.stat().st_size / 1e6],
    ]
    return rows, memory


async def _acquires(session: Session, grant: bytes, prompts: list[bytes], rounds: int) -> list[float]:
    times = []
    for number in range(rounds):
        begun = time.perf_counter_ns()
        lease = await session.acquire(grant, prompts[number % len(prompts)])
        times.append((time.perf_counter_ns() - begun) / 1000)
        copied = lease.HasField("copy")
        await session.report(SequenceReport(LeaseId(lease.lease_id), copied=copied, release=True))
    return times


async def _seals(session: Session, grant: bytes, fresh: Any, rounds: int, *, at_once: bool = False) -> list[float]:
    """As a step of 64 decoding sequences reports: each seals its next token, one in sixteen a whole block; or,
    `at_once`, all of them one in every sixteenth report, as sequences do that began together."""
    lengths = [64 + number % BLOCK_TOKENS * (not at_once) for number in range(SEQUENCES)]
    answers = [await session.acquire(grant, fresh(length)) for length in lengths]
    leases = [LeaseId(answer.lease_id) for answer in answers]
    await session.report(
        *(SequenceReport(LeaseId(answer.lease_id), copied=answer.HasField("copy")) for answer in answers)
    )
    sealed = lengths
    times = []
    for _ in range(rounds):
        token = fresh(SEQUENCES)
        taken = [NOTHING] * SEQUENCES
        for number, count in enumerate(sealed):
            if count % BLOCK_TOKENS == 0:
                answer = await session.ask(credit=cache_pb2.CreditRequest(wanted_blocks=1))
                taken[number] = unpack_tokens(answer.credit)
        reports = [
            SequenceReport(
                lease,
                taken_blocks=taken[number],
                tokens=token[number * 4 : number * 4 + 4],
                sealed_tokens=sealed[number] + 1,
            )
            for number, lease in enumerate(leases)
        ]
        begun = time.perf_counter_ns()
        await session.report(*reports)
        times.append((time.perf_counter_ns() - begun) / 1000)
        sealed = [count + 1 for count in sealed]
    await session.report(*(SequenceReport(lease, release=True) for lease in leases))
    return times


async def _timed(call: Any) -> float:
    begun = time.perf_counter_ns()
    await call
    return (time.perf_counter_ns() - begun) / 1000


def resident_bytes(process_id: int) -> int:
    """Resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
