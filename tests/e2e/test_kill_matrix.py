"""The kill matrix: kill -9 of {gateway, decoder, cache manager, client} at each kind of moment, on real processes.

Of each cell: who was lost with the victim is told UNAVAILABLE and nobody else is; no token is wrong; the victim comes
back; what was warm is a hit; nothing stays held, neither blocks nor descriptors. A few cells run by default, the whole
matrix under `slow`. `test_daemon_death.py` and `test_process_death.py` go deeper into single cells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Background, make_request
from tests.e2e.client_process import client_process
from tests.e2e.moments import MOMENTS, POOL_BLOCKS, B, Moment
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import START_SECONDS, Node

SLOW = ["step_delay=0.02", "poison_on_free=1"]
JITTER_SECONDS = 0.03  # a little more than a step
GIVEN_UP_SECONDS = 4.0  # after the death of whom it was for, work ends
LASTING_TOKENS = 400  # at 20 ms each, at least
VICTIMS = {"gateway": "gateway", "decoder": "decoder-0", "daemon": "cachemgr", "client": "client"}
BY_DEFAULT = {
    ("gateway", "queued"), ("gateway", "prefill"), ("gateway", "copy"), ("gateway", "evict"),
    ("decoder", "copy"), ("client", "queued"), ("client", "prefill"),
}  # fmt: skip
PAIRED = ("queued", "prefill", "copy", "seal")
CELLS = [
    pytest.param(
        victim, moment, id=f"{victim}-{moment.name}",
        marks=() if (victim, moment.name) in BY_DEFAULT else pytest.mark.slow,
    )
    for victim in VICTIMS
    for moment in MOMENTS
]  # fmt: skip


@pytest.fixture(scope="module")
def shared_mortal(tiny_model: Path) -> Iterator[Node]:
    """A slow node whose processes the tests kill; prompts are prefilled in chunks of two blocks."""
    options = ["--threads", "1", "--chunk-tokens", str(2 * B)]
    with Node(tiny_model, pool_blocks=POOL_BLOCKS, faults=SLOW, options=options) as node:
        yield node


@pytest.fixture
def mortal(shared_mortal: Node) -> Iterator[Node]:
    """The node with all processes running, quiet and empty before the test and quiet after it."""
    shared_mortal.fresh()
    yield shared_mortal
    shared_mortal.quiet()


def descriptors(node: Node, process: str) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{node.processes[process].pid}/fd"))


def lasting(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The same request with an answer that takes longer than anybody waits for it to be given up."""
    longer = pb.GenerateRequest()
    longer.CopyFrom(request)
    longer.stopping.max_tokens = LASTING_TOKENS
    return longer


def strike(node: Node, victim: str, prompts: Prompts) -> None:
    """kill -9, within a step of now."""
    delay = prompts.random.random() * JITTER_SECONDS
    end = time.monotonic() + delay
    poll(lambda: time.monotonic() > end, within=5, what="the moment has come")
    node.processes[VICTIMS[victim]].kill()
    print(f"{victim} killed {delay:.3f} s after the moment")


def revive(node: Node, victim: str) -> None:
    """Starts the victim again and waits until the node serves."""
    if victim != "client":
        node.processes[VICTIMS[victim]].start()
    node.again(make_request([5, 6, 7], new=1, no_store=True))
    poll(lambda: len(node.admin.sessions()) == 1, within=START_SECONDS, what="one decoder is attached")


def check_calls(solo: Solo, requests: list[pb.GenerateRequest], calls: list[Background], *, lost: bool) -> None:
    """Each call equals its solo run, or has ended UNAVAILABLE where it may be `lost`; then at least one is."""
    ended = 0
    for request, call in zip(requests, calls, strict=True):
        try:
            solo.check(request, call.result())
        except grpc.RpcError as error:
            assert lost and error.code() is grpc.StatusCode.UNAVAILABLE, error
            ended += 1
    assert ended or not lost or not requests, "positive control: something ran when the victim died"


@pytest.mark.parametrize(("victim", "moment"), CELLS)
def test_a_death_costs_what_it_must_and_no_more(
    mortal: Node, solo: Solo, prompts: Prompts, tmp_path: Path, victim: str, moment: Moment
) -> None:
    """One cell of the matrix."""
    warm = prompts.tokens(3 * B + 5)
    mortal.generate(make_request(warm, new=1))
    requests = moment.load(prompts, warm)
    sent = [lasting(request) for request in requests] if victim in ("gateway", "client") else requests
    neighbour = make_request(prompts.tokens(B), new=60)
    before, open_files = mortal.quiet(), descriptors(mortal, "cachemgr")
    bystanders, calls = [], []
    if victim == "client":
        mortal.processes["client"] = client_process(mortal, sent, tmp_path)
        mortal.processes["client"].start()
        poll(lambda: "sent" in mortal.processes["client"].text(), within=60, what="the client has sent its requests")
        bystanders = [mortal.background(neighbour)]
    else:
        calls = [mortal.background(request) for request in sent]
    poll(lambda: moment.reached(mortal, before, mortal.admin.snapshot()), within=30, what=f"the moment: {moment.name}")
    strike(mortal, victim, prompts)
    if victim == "client":
        assert "[[" not in mortal.processes.pop("client").text() or not requests, "positive control: it was not done"
        check_calls(solo, [neighbour], bystanders, lost=False)
    if victim != "daemon":  # a daemon that is not there can say nothing
        poll(lambda: not mortal.busy(), within=GIVEN_UP_SECONDS, what="nothing is held for what was lost")
    revive(mortal, victim)
    if victim != "client":
        check_calls(solo, sent, calls, lost=victim != "daemon")
    mortal.quiet()
    if not moment.evicts:
        again = make_request([*warm, *prompts.tokens(2)], new=3)
        hit = mortal.generate(again)
        assert hit.cached_tokens == len(warm), f"{hit.cached_tokens} of {len(warm)} warm tokens are left"
        solo.check(again, hit)
    for request in requests[:1]:
        solo.check(request, mortal.generate(request))
    mortal.quiet()
    if victim != "daemon":
        poll(
            lambda: descriptors(mortal, "cachemgr") <= open_files + 2, within=20,
            what=f"the cache manager holds {open_files} descriptors again",
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, id=moment.name) for moment in MOMENTS if moment.name in PAIRED],
)
@pytest.mark.parametrize("other", ["gateway", "client"])
def test_the_daemon_and_another_die_together(
    mortal: Node, solo: Solo, prompts: Prompts, tmp_path: Path, other: str, moment: Moment
) -> None:
    """What the dead gateway or client had asked for is given up by the decoder while no cache manager hears of it: the
    next one adopts nothing that nobody wants, and what was warm is a hit."""
    warm = prompts.tokens(3 * B + 5)
    mortal.generate(make_request(warm, new=1))
    before = mortal.quiet()
    client = client_process(mortal, [lasting(request) for request in moment.load(prompts, warm)], tmp_path)
    mortal.processes["client"] = client
    client.start()
    poll(lambda: moment.reached(mortal, before, mortal.admin.snapshot()), within=60, what=f"the moment: {moment.name}")
    order = [other, "daemon"] if prompts.random.random() < 0.5 else ["daemon", other]
    for victim in order:
        strike(mortal, victim, prompts)
    for victim in reversed(order):
        if victim != "client":
            mortal.processes[VICTIMS[victim]].start()
    revived = make_request(prompts.tokens(B), new=4)
    solo.check(revived, mortal.again(revived))
    poll(lambda: not mortal.busy(), within=GIVEN_UP_SECONDS, what="nothing is held for what was lost")
    mortal.processes.pop("client").kill()
    mortal.quiet()
    if not moment.evicts:
        again = make_request([*warm, *prompts.tokens(2)], new=3)
        hit = mortal.generate(again)
        assert hit.cached_tokens == len(warm)
        solo.check(again, hit)


@pytest.mark.parametrize(
    "victim", ["gateway", *(pytest.param(name, marks=pytest.mark.slow) for name in ("decoder", "daemon"))]
)
def test_a_death_while_registering(mortal: Node, solo: Solo, prompts: Prompts, victim: str) -> None:
    """A gateway or decoder dies when the socket of whom it registers with has just got its connection, or that cache
    manager dies then: the next one registers, one session is there, and requests are served."""
    newcomer = "decoder" if victim == "daemon" else victim
    host = "cachemgr" if newcomer == "decoder" else "decoder-0"
    process = mortal.processes[VICTIMS[newcomer]]
    process.kill()
    poll(lambda: newcomer == "gateway" or not mortal.admin.sessions(), within=20, what="the session is over")
    connected = descriptors(mortal, host)
    process.start()
    poll(lambda: descriptors(mortal, host) > connected, within=START_SECONDS, what=f"the {newcomer} is connected")
    mortal.processes[VICTIMS[victim]].kill()
    revive(mortal, victim)
    request = make_request(prompts.tokens(2 * B), new=4)
    solo.check(request, mortal.generate(request))
    mortal.quiet()


def test_a_client_that_dies_as_it_asks(mortal: Node, solo: Solo, prompts: Prompts, tmp_path: Path) -> None:
    """A client is killed when its requests have just left it: what came of them ends, and nothing is held."""
    client = client_process(mortal, [make_request(prompts.tokens(3 * B), new=400) for _ in range(4)], tmp_path)
    client.start()
    poll(lambda: "sent" in client.text(), within=60, what="the client has sent its requests")
    client.kill()
    poll(lambda: not mortal.busy(), within=GIVEN_UP_SECONDS, what="nothing is held for the dead client")
    solo.probe(mortal)
