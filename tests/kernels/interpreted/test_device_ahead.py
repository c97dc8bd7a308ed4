"""Steps that are queued before the ids of the one before are read: whose ids feed whom, and when memory is free again.

`LazySide` stands in for the side stream: a copy is made when somebody waits for it, the host or the steps, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import Internal
from decoder.batch import DrawColumns
from decoder.models.device_draws import DrawnIds
from decoder.models.device_model import DeviceModel
from decoder.models.device_results import CudaSideStream, NoSideStream
from decoder.runner import AheadModel
from decoder.sampler import Draw, sample
from decoder.sequence import SamplingParams
from decoder.weights import load_model
from decoder.weights.source import open_source
from tests.decoder.rig import Node, request
from tests.kernels.interpreted.test_device_model import VOCAB, Row, arena_of, batch_of, config_of, model_of
from tests.kernels.rig import DEVICE
from tests.tiny_models import make_tiny_llama

UNREAD = -7


class LazyCopy:
    """A copy that is not made yet."""

    def __init__(self, side: LazySide, number: int, result: torch.Tensor) -> None:
        self._side, self.number, self._result = side, number, result
        self.host = np.full(result.shape, UNREAD)
        self.made = False

    def make(self) -> None:
        """Make it, from what lies there now."""
        if not self.made:
            self.host = self._result.numpy(force=True).copy()
            self.made = True

    def wait(self) -> Any:
        """See Arrival."""
        self._side.log.append(("wait", self.number))
        self.make()
        return self.host


class LazySide:
    """See SideStream; `log` has what was done, in order. Without `holds` steps wait for no copy: a broken stream."""

    def __init__(self, *, holds: bool = True) -> None:
        self.log: list[tuple[str, int]] = []
        self.copies: list[LazyCopy] = []
        self._holds = holds

    def bring(self, result: torch.Tensor) -> LazyCopy:
        """See SideStream."""
        self.copies.append(LazyCopy(self, len(self.copies) + 1, result))
        self.log.append(("bring", len(self.copies)))
        return self.copies[-1]

    def hold(self, arrival: Any) -> None:
        """See SideStream."""
        self.log.append(("hold", arrival.number))
        if self._holds:
            arrival.make()

    def drain(self) -> None:
        """See SideStream."""
        self.log.append(("drain", 0))
        for copy in self.copies:
            copy.make()


def columns_of(rows: int, sources: list[int] | None = None, **changes: Any) -> DrawColumns:
    """Greedy draws, and which row of the draw before each decode is fed with."""
    zeros = np.zeros(rows, np.int32)
    values = {
        "temperatures": np.zeros(rows), "seeds": np.zeros(rows, np.uint64), "samples": zeros, "positions": zeros,
        "sources": np.array(sources or [], np.int32), **changes,
    }  # fmt: skip
    return DrawColumns(**values)


def peaks(*tokens: int) -> torch.Tensor:
    """Logits whose likeliest tokens these are; a row of NaN for a negative one."""
    logits = torch.zeros((len(tokens), VOCAB), device=DEVICE)
    for row, token in zip(logits, tokens, strict=True):
        if token < 0:
            row.fill_(torch.nan)
        else:
            row[token] = 1.0
    return logits


def drawn_ids(side: LazySide) -> DrawnIds:
    return DrawnIds(VOCAB, DEVICE, side)


def draw(ids: DrawnIds, *tokens: int) -> LazyCopy:
    """Draw these."""
    arrival = ids.draw(peaks(*tokens), ids.upload(columns_of(len(tokens)), 0))
    assert isinstance(arrival, LazyCopy)
    return arrival


def fed(ids: DrawnIds, known: list[int], sources: list[int]) -> list[int]:
    """The inputs of decodes whose known tokens are `known`."""
    tokens = torch.tensor(known, dtype=torch.int32, device=DEVICE)
    ids.feed(tokens, ids.upload(columns_of(0, sources), len(sources)))
    return tokens.tolist()


def test_results_in_the_hosts_memory_stay_what_they_were() -> None:
    """Where nothing is copied beside the steps, ids that nobody has read yet survive the draws after them."""
    ids = DrawnIds(VOCAB, DEVICE, CudaSideStream(DEVICE) if DEVICE.type == "cuda" else NoSideStream())
    arrivals = [ids.draw(peaks(token), ids.upload(columns_of(1), 0)) for token in range(9)]
    assert [int(arrival.wait()[0]) for arrival in arrivals] == list(range(9))


@pytest.mark.parametrize("holds", [True, False])
def test_ids_are_read_before_their_memory_is_drawn_into_again(holds: bool) -> None:
    """Two draws in turn use two memories; the third waits for the copy of the first, and for no other. Without that
    wait the first would be lost."""
    side = LazySide(holds=holds)
    ids = drawn_ids(side)
    arrivals = [draw(ids, 3, 5), draw(ids, 7, 9), draw(ids, 11, 13), draw(ids, 15, 17)]
    assert [it for it in side.log if it[0] != "wait"] == [
        ("bring", 1), ("bring", 2), ("hold", 1), ("bring", 3), ("hold", 2), ("bring", 4),
    ]  # fmt: skip
    got = [arrival.wait().tolist() for arrival in arrivals]
    assert (got == [[3, 5], [7, 9], [11, 13], [15, 17]]) is holds


def test_more_rows_than_before_are_drawn_into_other_memory() -> None:
    """Memory that grows is let go only when its ids are read, and feeds what it should until then."""
    side = LazySide()
    ids = drawn_ids(side)
    many = list(range(100))
    arrivals = [draw(ids, *tokens) for tokens in ([1], [2, 3], many, many[::-1], [4])]
    assert [it.wait().tolist() for it in arrivals] == [[1], [2, 3], many, many[::-1], [4]]
    assert fed(ids, [50, 60], [-1, 0]) == [50, 4]


def test_decodes_are_fed_with_the_draw_before() -> None:
    """Each takes its row of the newest draw, or keeps its known token; the host has read nothing yet."""
    side = LazySide()
    ids = drawn_ids(side)
    draw(ids, 3, 5, 9)
    assert fed(ids, [100, 101, 102, 103], [2, -1, 0, -1]) == [9, 101, 3, 103]
    draw(ids, 8)
    assert fed(ids, [0, 7], [0, -1]) == [8, 7]
    assert not any(copy.made for copy in side.copies)


def test_a_row_without_a_token_feeds_a_token_of_the_vocabulary() -> None:
    """NO_TOKEN is told to the host, whose request ends; the step after it is fed with something that it can look up."""
    ids = drawn_ids(LazySide())
    arrival = draw(ids, -1, 6)
    assert fed(ids, [100, 101], [0, 1]) == [0, 6]
    assert arrival.wait().tolist() == [-1, 6]


def test_columns_that_do_not_fit_are_refused() -> None:
    """A row that was not drawn, fewer sources than decodes, columns of two lengths; nothing is changed."""
    ids = drawn_ids(LazySide())
    draw(ids, 3, 5)
    with pytest.raises(Internal, match="was not drawn"):
        ids.upload(columns_of(1, [2]), 1)
    with pytest.raises(Internal, match="different lengths"):
        ids.upload(columns_of(1, [0]), 2)
    with pytest.raises(Internal, match="different lengths"):
        ids.upload(columns_of(1, [0], seeds=np.zeros(2, np.uint64)), 1)
    model = model_of(config_of())
    with pytest.raises(Internal, match="do not fit the logit rows"):
        model.launch(batch_of([(Row(np.arange(3), [1]), 3)]), arena_of(model, 2), columns_of(2))


def test_a_chunk_that_draws_nothing_is_launched() -> None:
    """Its keys and values are there for the next step; the ids that arrive are none."""
    model, plain = model_of(config_of(), side=LazySide()), model_of(config_of())
    tokens, logits = np.random.default_rng(1).integers(0, VOCAB, 9), []
    for each in (model, plain):
        arena, row = arena_of(each, 2), Row(tokens, [1])
        batch = batch_of([(row, 8)])
        if each is model:
            batch = type(batch)(**{**_fields(batch), "logit_rows": np.empty(0, np.int32)})
            assert each.launch(batch, arena, columns_of(0)).wait().tolist() == []
        else:
            each.forward(batch, arena)
        logits.append(each.forward(batch_of([(row, 1)]), arena).copy())
    assert np.array_equal(*logits)


def test_a_step_is_fed_and_drawn_before_anybody_reads() -> None:
    """A chunk beside a decode, then decodes in fixed memory, each launched before the ids of the one before are read:
    the ids of a model whose steps are taken one by one and drawn on the host, at temperature 0 and 1."""
    config, side = config_of(), LazySide()
    ahead, plain = model_of(config, side=side), model_of(config)
    assert isinstance(ahead, AheadModel)
    prompts = [np.random.default_rng(seed).integers(0, VOCAB, size) for seed, size in ((1, 9), (2, 5))]
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=(1 << 64) - 3)]
    steps, want = 4, []
    arena = arena_of(plain, 4)
    rows = [Row(np.resize(prompt, len(prompt) + steps), [index + 1]) for index, prompt in enumerate(prompts)]
    plain.forward(batch_of([(rows[0], 8)]), arena)
    for step in range(steps):
        parts = [(rows[0], 1), (rows[1], 1 if step else 5)]
        logits = plain.forward(batch_of(parts), arena)[[0, -1]]
        draws = [Draw(i, params[i], i, rows[i].done) for i in range(2)]
        want.append([it.token for it in sample(logits, draws)])
        for row, token in zip(rows, want[-1], strict=True):
            row.tokens[row.done : row.done + 1] = token or 0
    arena, arrivals = arena_of(ahead, 4), []
    rows = [Row(np.resize(prompt, len(prompt) + steps), [index + 1]) for index, prompt in enumerate(prompts)]
    ahead.forward(batch_of([(rows[0], 8)]), arena)
    for step in range(steps):
        batch = batch_of([(rows[0], 1), (rows[1], 1 if step else 5)])
        batch = type(batch)(**{**_fields(batch), "logit_rows": np.array([0, len(batch.token_ids) - 1], np.int32)})
        if step:
            batch.token_ids[:] = 0  # nobody knows them
        columns = columns_of(
            2, [0, 1] if step else [-1], temperatures=np.array([0.0, 1.0]),
            seeds=np.array([0, params[1].seed], np.uint64), samples=np.array([0, 1], np.int32),
            positions=np.array([row.done for row in rows], np.int32),
        )  # fmt: skip
        arrivals.append(ahead.launch(batch, arena, columns))
    assert sum(what == "wait" for what, _ in side.log) == 1  # the chunk's, by `forward`
    assert [arrival.wait().tolist() for arrival in arrivals] == want


def _fields(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__slots__}


def test_an_engine_launches_ahead_and_gives_the_tokens_of_the_cpu_model(tmp_path: Path) -> None:
    """Arrivals, a stop, a cancel, a request that the host draws for: the tokens are those of the CPU's model, and steps
    are launched before the ids of those before them are read."""
    folder = make_tiny_llama(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, intermediate=64, max_position=256)
    on_cpu, source, side = load_model(folder, "float32", 16), open_source(folder), LazySide()
    on_device = DeviceModel(on_cpu.config, on_cpu.layout, on_cpu.digests, source.read, DEVICE, side=side)
    prompts = [np.random.default_rng(seed).integers(3, 512, 5 + 7 * seed).tolist() for seed in range(4)]
    stop = None
    results = []
    for model in (on_cpu, on_device):
        arena = np.full((41, *model.layout.block_shape), np.nan, np.float32)
        blocks = arena if model is on_cpu or DEVICE.type == "cpu" else torch.from_numpy(arena).to(DEVICE)
        node: Any = Node(40, model=model, arena=blocks, chunk_tokens=16)
        node.submit(request(0, prompts[0], max_tokens=9, temperature=1.0, seed=4))
        node.submit(request(1, prompts[1], max_tokens=9, stop_ids=[] if stop is None else [stop]))
        node.step(4)
        node.submit(request(2, prompts[2], max_tokens=3, repetition_penalty=1.3))
        node.submit(request(3, prompts[3], max_tokens=40))
        node.finish(0, 1, 2)
        node.engine.cancel(node.sink, 3)
        node.assert_quiet()
        if stop is None:  # the second time a token ends the sample that did not end it before
            stop = node.sink.tokens[1, 0][4]
        results.append(dict(node.sink.tokens))
    cpu, device = results
    cut = cpu[1, 0].index(stop) + 1
    assert device[1, 0] == cpu[1, 0][:cut]
    assert [device[n, 0] for n in (0, 2)] == [cpu[n, 0] for n in (0, 2)]
    shorter = min(len(it[3, 0]) for it in results)
    assert shorter and device[3, 0][:shorter] == cpu[3, 0][:shorter]
    ahead = sum(side.log[at : at + 2] == [("bring", n), ("wait", n - 1)] for at, (_, n) in enumerate(side.log))
    assert ahead >= 6, side.log
