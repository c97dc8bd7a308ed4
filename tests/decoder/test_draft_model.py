"""A draft model: its guesses are its own greedy text, its blocks are bounded, and it changes no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidArgument, ResourceExhausted
from common.layout import KvLayout
from decoder.draft_model import DraftModel, check_same_vocabulary, load_draft, num_draft_blocks
from decoder.grouped_arena import parts_of
from decoder.models.packing import Memory
from decoder.sequence import Request, Sequence, SequenceId, SequenceState, SpeculationMode, SpeculationParams
from decoder.weights import load_model
from decoder.windows import Windows
from tests.decoder.model_rig import empty_arena
from tests.decoder.rig import BLOCK_TOKENS, VOCAB, Node, RecallModel, greedy_oracle, prompt_of, request, solo
from tests.tiny_models import make_tiny_llama

DRAFT = SpeculationParams(SpeculationMode.DRAFT_MODEL, 6)


def sequence_of(number: int, item: Request, generated: list[int]) -> Sequence:
    sequence = Sequence(SequenceId(number), item, 0, number, is_trunk=False)
    sequence.state = SequenceState.RUNNING
    for token in generated:
        sequence.append_token(token)
    return sequence


def drafting(node: Node, model: Any, num_blocks: int = 400) -> DraftModel:
    """A node whose guesses are those of `model`."""
    drafter = DraftModel(model, model.arena(num_blocks), node.options.chunk_tokens)
    node.engine._loop._speculator._drafters[SpeculationMode.DRAFT_MODEL] = drafter
    return drafter


def test_guesses_are_the_greedy_text_of_the_draft_model() -> None:
    """After right, partly right and wrong guesses alike, the next ones are what the model says after what was told."""
    model = RecallModel()
    drafter = DraftModel(model, model.arena(60), 64)
    random = np.random.default_rng(1)
    sequences = [sequence_of(n, request(n, prompt_of(3 + 2 * n, n), max_tokens=500), [7]) for n in range(4)]
    for _ in range(12):
        wanted = [(sequence, int(random.integers(1, 7))) for sequence in sequences if random.random() < 0.8]
        for (sequence, count), guess in zip(wanted, drafter.propose(wanted), strict=True):
            assert guess.tolist() == greedy_oracle(sequence.tokens.tolist(), count)
            told = guess[: random.integers(0, len(guess) + 1)].tolist()
            for token in [*told, int(random.integers(4, 90))]:
                sequence.append_token(token)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_after_a_pass_that_failed_guesses_are_right_again(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence whose guessing broke off, in whichever pass, no guess that was computed counts as a token."""
    model = RecallModel()
    drafter = DraftModel(model, model.arena(60), 64)
    sequence = sequence_of(1, request(1, prompt_of(9), max_tokens=50), [7])
    calls, forward = 0, model.forward

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise MemoryError
        return forward(*arguments)

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(MemoryError):
        drafter.propose([(sequence, 4)])
    for token in (90, 91, 92):  # none that was guessed
        sequence.append_token(token)
    assert drafter.propose([(sequence, 3)])[0].tolist() == greedy_oracle(sequence.tokens.tolist(), 3)


def test_a_long_prompt_is_caught_up_with_in_chunks() -> None:
    """No call computes more than its chunk to catch up; guesses begin when the whole prompt is computed."""
    model = RecallModel()
    drafter = DraftModel(model, model.arena(60), 16)
    sequence = sequence_of(1, request(1, prompt_of(39), max_tokens=50), [7])
    lengths = [len(drafter.propose([(sequence, 3)])[0]) for _ in range(3)]
    assert lengths == [0, 0, 3]
    assert max(tokens for _, tokens in model.batches) == 16


def test_blocks_are_bounded_and_come_back() -> None:
    """Without room there is no guess; who is not asked about gives way; who has ended leaves nothing behind."""
    model = RecallModel()
    drafter = DraftModel(model, model.arena(6), 64)
    first = sequence_of(1, request(1, prompt_of(4 * BLOCK_TOKENS - 3), max_tokens=50), [7])
    second = sequence_of(2, request(2, prompt_of(4 * BLOCK_TOKENS - 3, 2), max_tokens=50), [7])
    both = drafter.propose([(first, 2), (second, 2)])
    assert [len(guess) for guess in both] == [2, 0], "no room for both, and neither takes the other's"
    assert len(drafter.propose([(second, 2)])[0]) == 2, "alone it takes the room of the other"
    guess = drafter.propose([(first, 2)])[0]
    assert guess.tolist() == greedy_oracle(first.tokens.tolist(), 2), "computed anew"
    first.state = second.state = SequenceState.FINISHED
    assert drafter.propose([]) == []
    assert drafter.num_free_blocks == 6


def test_what_the_draft_model_cannot_hold_is_decoded_without_guesses() -> None:
    """Beyond the draft model's own positions there is no guess, and the answer goes on."""
    small = RecallModel()
    small.config.max_position = 20
    node = Node()
    drafting(node, small)
    item = request(1, prompt_of(9), max_tokens=40, speculation=DRAFT)
    node.submit(item)
    node.finish(1)
    assert node.sink.tokens[1, 0] == solo(item)[0]
    assert 0 < node.sink.drafts[1][0] < 20


def test_long_prompts_never_wait_for_each_others_blocks() -> None:
    """Two that are caught up with in chunks, on room for one: the first gets all it needs at once, and is guessed for;
    when it ends the other is."""
    model = RecallModel()
    drafter = DraftModel(model, model.arena(24), 16)
    both = [sequence_of(n, request(n, prompt_of(70, n), max_tokens=50), [7]) for n in range(2)]
    lengths = [[len(guess) for guess in drafter.propose([(sequence, 2) for sequence in both])] for _ in range(6)]
    assert lengths[3:] == [[0, 0], [2, 0], [0, 0]], "then it waits to be told a token"
    both[0].state = SequenceState.FINISHED
    assert [len(drafter.propose([(both[1], 2)])[0]) for _ in range(5)] == [0, 0, 0, 0, 2]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize("other", [False, True])
def test_a_draft_of_itself_is_always_right_and_another_one_changes_nothing(
    sampling: dict[str, Any], other: bool
) -> None:
    """The positive control: greedily the same model guesses every token; another one does not. The tokens are those
    without guesses, on a pool that forces preemption too."""
    items = [request(n, prompt_of(9 + n, n), max_tokens=40, speculation=DRAFT, **sampling) for n in range(5)]
    node = Node(num_blocks=40, chunk_tokens=64)
    drafter = drafting(node, RecallModel(window=2) if other else RecallModel())
    for item in items:
        node.submit(item)
    node.finish(*range(5))
    for item in items:
        assert node.sink.tokens[item.number, 0] == solo(item)[0]
    drafted, accepted = (sum(column) for column in zip(*node.sink.drafts.values(), strict=True))
    assert accepted == drafted > 0 if not sampling and not other else accepted < drafted
    assert node.manager.snapshot().preemptions
    node.assert_quiet()
    drafter.propose([])
    assert drafter.num_free_blocks == 400


def test_two_real_models(tmp_path: Path) -> None:
    """With tiny Llamas: the draft of itself is accepted whole, another one is not, and no bit of the answer changes."""
    models = [
        load_model(make_tiny_llama(tmp_path / name, layers=layers, seed=seed), "float32", 16)
        for name, layers, seed in (("large", 2, 0), ("small", 1, 9))
    ]

    def arena(model: Any) -> Any:
        return np.full((65, *model.layout.block_shape), np.nan, np.float32)

    told = []
    for draft in (None, *models):
        node = Node(64, model=models[0], arena=arena(models[0]), chunk_tokens=64)
        if draft is not None:
            drafter = DraftModel(draft, arena(draft), 64)
            node.engine._loop._speculator._drafters[SpeculationMode.DRAFT_MODEL] = drafter
        for number in range(3):
            item = request(number, prompt_of(20 + 9 * number, number), max_tokens=30, num_logprobs=1)
            node.submit(replace(item, speculation=None if draft is None else DRAFT))
        node.finish(0, 1, 2)
        told.append((node.sink.tokens, node.sink.logprobs))
        drafted, accepted = (sum(column) for column in zip(*node.sink.drafts.values(), strict=True))
        if draft is not None:
            assert accepted == drafted if draft is models[0] else accepted < drafted
            assert drafted
        node.assert_quiet()
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("field", ["vocab_size", "eos_token_ids", "bos_token_id"])
def test_a_draft_model_of_another_vocabulary_is_refused_by_name(field: str) -> None:
    """What differs is named; the same ids are accepted."""
    config = {"vocab_size": 97, "eos_token_ids": (2,), "bos_token_id": 1}
    model, draft = (SimpleNamespace(config=SimpleNamespace(**config)) for _ in range(2))
    check_same_vocabulary(model, draft)  # type: ignore[arg-type]
    setattr(draft.config, field, 5)
    with pytest.raises(InvalidArgument, match=field):
        check_same_vocabulary(model, draft)  # type: ignore[arg-type]


def test_its_memory_is_what_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as fit, with the null one and with window blocks; too few for one sequence are refused by the
    option's name, and weights that the machine has no memory for before any is taken."""
    layout = RecallModel().layout
    mixed = KvLayout.of(6, 1, 16, 16, "float32", 40, (0, 1, 3, 4, 5))
    for one in (layout, mixed):
        model: Any = SimpleNamespace(layout=one)
        for allowed in (one.arena_bytes(1), 123_456, 10_000_000):
            count = num_draft_blocks(model, allowed)
            assert one.arena_bytes(count) <= allowed < one.arena_bytes(count + 1)
        with pytest.raises(InvalidArgument, match="draft_kv_bytes"):
            num_draft_blocks(model, one.arena_bytes(1) - 1)
    Memory(1 << 20)
    monkeypatch.setattr("common.memory.available_bytes", lambda: (1 << 20) - 1)
    with pytest.raises(ResourceExhausted, match="its weights take 1048576 bytes of memory; 1048575 can be taken"):
        Memory(1 << 20)


# ---- layers with windows

GROUP_WINDOW = 10


def long_text(drafter: DraftModel, sequence: Sequence, count: int, after: Callable[[], object]) -> list[bool]:
    """Whether each guess is right while `count` tokens are told: whole guesses or parts of them, and one token that was
    not guessed. `after` runs after each guess."""
    rights, random = [], np.random.default_rng(2)
    while sequence.num_generated < count:
        guess = drafter.propose([(sequence, 5)])[0].tolist()
        rights.append(guess == greedy_oracle(sequence.tokens.tolist(), 5))
        after()
        told = guess if random.random() < 0.6 else guess[: random.integers(0, len(guess) + 1)]
        other = (guess[len(told)] + 1) % VOCAB if len(told) < len(guess) else 7
        for token in [*told, other]:
            sequence.append_token(token)
    return rights


def grouped_draft() -> tuple[DraftModel, Any, int]:
    """A draft with a window in one of two layers, on window blocks for three windows, and how many those are."""
    model: Any = RecallModel(group_window=GROUP_WINDOW)
    arena = empty_arena(model, 120, 3 * model.layout.window_reach)
    return DraftModel(model, arena, 16), arena, len(arena.window_blocks) - 1


def poison_free_window_blocks(arena: Any) -> None:
    """Whatever no block has is NaN."""
    free = np.setdiff1d(np.arange(len(arena.window_blocks)), arena.of)
    arena.window_blocks[free] = np.nan


def test_a_draft_with_windows_keeps_no_window_block_that_it_has_passed() -> None:
    """A prompt and an answer of many windows, on window blocks for three: guesses are right all along, between two of
    them a sequence holds its window alone, and others find room beside it; what was given up is NaN."""
    drafter, arena, total = grouped_draft()
    sequence = sequence_of(1, request(1, prompt_of(83), max_tokens=500), [])
    held: list[int] = []

    def after() -> None:
        poison_free_window_blocks(arena)
        held.append(total - drafter.num_free_window_blocks)

    assert long_text(drafter, sequence, 150, after) == [False] * 9 + [True] * (len(held) - 9), "first the prompt"
    model = RecallModel(group_window=GROUP_WINDOW)
    # Of the window, the guesses, and what was computed since: the tokens of one step.
    assert max(held[10:]) <= model.layout.blocks_for(GROUP_WINDOW + 2 * 6) + 1 < total
    other = sequence_of(2, request(2, prompt_of(70, 3), max_tokens=500), [])
    assert all(long_text(drafter, other, 60, after)[9:])
    sequence.state = other.state = SequenceState.FINISHED
    assert drafter.propose([]) == []
    assert (drafter.num_free_window_blocks, drafter.num_free_blocks) == (total, 120)
    assert not arena.of.any()


def test_drafts_with_windows_never_wait_for_each_others_window_blocks() -> None:
    """Many long prompts on window blocks for few: as many as are admitted come to their guesses, and keep getting them;
    the others follow when those end."""
    drafter, arena, _ = grouped_draft()
    sequences = [sequence_of(n, request(n, prompt_of(24 + n, n), max_tokens=99), [7]) for n in range(4)]
    guessed: list[set[int]] = []
    for _ in range(30):
        guesses = drafter.propose([(sequence, 2) for sequence in sequences])
        poison_free_window_blocks(arena)
        guessed.append({n for n, guess in enumerate(guesses) if len(guess)})
        for sequence, guess in zip(sequences, guesses, strict=True):
            if len(guess):
                assert guess.tolist() == greedy_oracle(sequence.tokens.tolist(), 2)
                sequence.append_token((int(guess[0]) + 1) % VOCAB)
    first = guessed[-1]
    assert 0 < len(first) < 4 and all(told == first for told in guessed[8:])
    for n in first:
        sequences[n].state = SequenceState.FINISHED
    left = [(sequence, 2) for n, sequence in enumerate(sequences) if n not in first]
    assert any(len(guess) for _ in range(8) for guess in drafter.propose(left))


def test_a_window_block_that_a_draft_gives_up_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a block sooner, and the draft has no guess, since what it reads is NaN."""
    passed_by = Windows.passed_by
    monkeypatch.setattr(Windows, "passed_by", lambda self, computed: passed_by(self, computed) + (computed > 40))
    drafter, arena, _ = grouped_draft()
    sequence = sequence_of(1, request(1, prompt_of(83), max_tokens=500), [])
    assert not any(long_text(drafter, sequence, 20, lambda: poison_free_window_blocks(arena)))


def test_a_draft_is_loaded_into_the_memory_that_was_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of blocks, in as many bytes as the option says, and nothing where the machine has less left."""
    pytest.importorskip("transformers")
    from tests.tiny_families import make_family

    make_family(tmp_path, "gemma3")
    model = load_model(tmp_path, "float32", 16)
    options: Any = SimpleNamespace(
        draft_model=tmp_path, block_tokens=16, kv_dtype=None, threads=1, max_context=None, weights_cache=None,
        draft_kv_bytes=1 << 20, chunk_tokens=64,
    )  # fmt: skip
    drafter = load_draft(options, model, "float32", lambda stage, done: None)
    assert drafter.num_free_window_blocks == model.layout.num_window_blocks(drafter.num_free_blocks) > 0
    taken = model.layout.arena_bytes(drafter.num_free_blocks)
    assert (1 << 20) - model.layout.block_bytes - 4096 < taken <= 1 << 20
    monkeypatch.setattr("common.memory.available_bytes", lambda: taken - 1)
    with pytest.raises(ResourceExhausted, match="draft_kv_bytes: keys and values of the draft model take"):
        load_draft(options, model, "float32", lambda stage, done: None)


@pytest.mark.parametrize(("name", "window"), [("gemma3", 40), ("gemma2", 40), ("mistral", 40)])
def test_real_drafts_with_windows(tmp_path: Path, name: str, window: int) -> None:
    """Tiny models with windows in some layers, or in all, as drafts of themselves, with room for little more than a
    window: every guess for prompts and answers of many windows is right, and nothing that is free is read."""
    pytest.importorskip("transformers")
    from tests.tiny_families import VOCABULARY, make_family

    make_family(tmp_path, name, sliding_window=window)
    model = load_model(tmp_path, "float32", 16)
    reach = model.layout.window_reach
    node = Node(96, model=model, arena=empty_arena(model, 96), chunk_tokens=64)
    # For two sequences, each with its window and a chunk; where every layer has a window, of blocks themselves.
    room = 2 * (reach + 3)
    arena = empty_arena(model, 96, room) if model.layout.grouped else empty_arena(model, room)
    drafter = DraftModel(model, arena, 32)
    node.engine._loop._speculator._drafters[SpeculationMode.DRAFT_MODEL] = drafter
    random = np.random.default_rng(5)
    for number in range(2):
        prompt = random.integers(3, VOCABULARY, 300 + 40 * number).tolist()
        node.submit(request(number, prompt, max_tokens=120, speculation=DRAFT))
    lowest = room

    def poisoned() -> bool:
        nonlocal lowest
        drafter._drop_ended()
        for draft in drafter._drafts.values():
            drafter._blocks.leave(draft.table, draft.computed)
        memory, _ = parts_of(arena, model.layout)[-1]
        blocks = {block for draft in drafter._drafts.values() for block in draft.table.blocks}
        held = {int(arena.of[block]) for block in blocks} if model.layout.grouped else blocks
        free = np.setdiff1d(np.arange(1, len(memory)), list(held))
        memory[free] = np.nan
        lowest = min(lowest, len(free))
        return all(node.sink.done(number) for number in range(2))

    node.until(poisoned)
    drafted, accepted = (sum(column) for column in zip(*node.sink.drafts.values(), strict=True))
    assert drafted == accepted > 120
    assert all(len(node.sink.tokens[number, 0]) == 120 for number in range(2))
    assert lowest < room - 2, "control: the room is used"
    drafter.propose([])
    usable = room if not model.layout.grouped else 96
    assert drafter.num_free_blocks == usable
    assert drafter.num_free_window_blocks == (room if model.layout.grouped else 0)
