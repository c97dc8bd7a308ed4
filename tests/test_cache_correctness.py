"""Whatever is cached, cut, copied, shared or evicted, an answer is the one that no cache would give.

The sections: cached and no-cache logits; positions around block boundaries; truncation, sliding window and rope
scaling; beam and speculative copy-on-write; prefix reuse across adapters and tenants; eviction never returns stale
blocks. Each runs tiny models of real families in the real engine over the real cache manager, and whatever is freed is
filled with NaN at once. "Equal" is equal tokens and equal log-probabilities to the last bit; what no cache would give
comes from the same model alone without cache, and from `transformers` without cache within 1e-3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachemgr.ids import TenantId
from cachemgr.keys import CacheKey, derive_root
from cachemgr.tenant_store import TenantStore
from cachemgr.tenants import Tenants
from decoder.adapter_pool import AdapterUse
from decoder.cache_api import Acquire, Acquired, Event
from decoder.grouped_arena import GroupedArena
from decoder.inprocess import InProcessClient
from decoder.sequence import BeamParams, SpeculationMode, SpeculationParams
from decoder.weights import load_model
from decoder.weights.adapter import load_adapter, module_shapes
from tests.decoder.model_rig import empty_arena
from tests.decoder.rig import Node, request
from tests.decoder.test_engine_speculation import Teller, indexed
from tests.tiny_adapters import adapter_config, adapter_tensors, merged, write_adapter
from tests.tiny_families import FAMILIES, PROMPT_TOKENS, VOCABULARY, make_family

pytest.importorskip("transformers")

B = 16
NEW = 12
Families = Callable[..., "Family"]
Told = tuple[tuple[list[int], list[Any]], ...]  # tokens and log-probabilities of each sample


@dataclass(frozen=True)
class Family:
    """A tiny model here and in `transformers`."""

    reference: Any
    model: Any

    def node(self, num_blocks: int = 96, num_window_blocks: int = 0, **options: Any) -> Served:
        """A node of its own, in whose arena everything that is free is NaN."""
        arena = empty_arena(self.model, num_blocks, num_window_blocks)
        return Served(num_blocks, model=self.model, arena=arena, **{"chunk_tokens": 40, **options})

    def alone(self, prompt: Sequence[int], **options: Any) -> Told:
        """What a fresh node says that neither reads nor stores, in one chunk."""
        return self.node(chunk_tokens=512).ask(prompt, no_read=True, no_store=True, **options)[1]

    def assert_no_cache_says(self, prompt: Sequence[int], told: Told) -> None:
        """`transformers`, which computes all of the text at once, has the same likeliest values at every position."""
        tokens, found = told[0]
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens[:-1]]])
            logits = self.reference(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        want = torch.log_softmax(logits.double(), -1).numpy()
        for row, token, value in zip(want, tokens, found, strict=True):
            assert value.chosen == pytest.approx(row[token], abs=1e-3, rel=1e-3)
            assert [logprob for _, logprob in value.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-3, rel=1e-3)


class Served(Node):
    """A node that is asked one request after the other."""

    number = 0

    def ask(
        self,
        prompt: Sequence[int],
        *,
        samples: int = 1,
        new: int = NEW,
        adapter: AdapterUse | None = None,
        interrupt: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> tuple[int, Told]:
        """Cached tokens and what was told; (-1, ()) where the request failed. `interrupt` runs once it is submitted."""
        self.number += 1
        options = {"num_logprobs": 3, **options}
        item = request(self.number, prompt, max_tokens=new, num_samples=samples, **options)
        self.submit(replace(item, adapter=adapter))
        interrupt()
        self.finish(self.number)
        self.assert_quiet()
        if self.number in self.sink.failed:
            return -1, ()
        keys = [(self.number, sample) for sample in range(samples)]
        told = tuple((self.sink.tokens[key], self.sink.logprobs[key]) for key in keys)
        return self.sink.cached[self.number], told

    def preempt_when(self, reached: Callable[[], bool]) -> None:
        """Once it is `reached` whoever runs loses its blocks."""
        self.until(reached)
        scheduler = self.engine._loop._scheduler
        assert scheduler.running
        for sequence in list(scheduler.running):
            self.engine._loop._reporter.release(sequence)
            scheduler.requeue(sequence)

    def spoil(self, change: Callable[[Acquired], Acquired]) -> None:
        """From now on the engine is told something else than what the cache manager answered."""
        acquire = self.client._acquire

        def spoiled(command: Acquire) -> Event:
            event = acquire(command)
            return change(event) if isinstance(event, Acquired) else event

        self.client._acquire = spoiled  # type: ignore[method-assign]

    def published(self) -> dict[int, bytes]:
        """The bytes of every whole block that the index lists, with those of its window block."""
        found = {}
        for tokens, blocks in indexed(self):
            whole = len(blocks) - bool(len(tokens) % B)
            found |= {block: self._bytes_of(block) for block in blocks[:whole]}
        return found

    def _bytes_of(self, block: int) -> bytes:
        if not isinstance(self.arena, GroupedArena):
            return bytes(self.arena[block].tobytes())
        pairs = self.manager.window_pairs(np.array([block], np.int32))
        windows = [self.arena.window_blocks[window_block].tobytes() for _, window_block in pairs]
        return b"".join([self.arena.blocks[block].tobytes(), *windows])


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Families by name and changed settings, each made once."""
    made: dict[str, Family] = {}

    def family(name: str, *, max_context: int = 0, **changes: Any) -> Family:
        key = repr((name, max_context, changes))
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            reference = make_family(folder, name, **changes)
            made[key] = Family(reference, load_model(folder, "float32", B, max_context=max_context))
        return made[key]

    return family


def text(length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    return np.random.default_rng([seed, 17]).integers(3, VOCABULARY, length).tolist()


# ---- cached and no-cache logits


@pytest.mark.parametrize(("name", "length"), [("llama3", 150), ("mistral", 90), ("gemma3", 90), ("phi3-long", 300)])
def test_cached_and_no_cache_logits(families: Families, name: str, length: int) -> None:
    """Cold, on a hit, on one that ends inside a block, and where a conversation goes on: the values without a cache."""
    family, prompt = families(name), text(length)
    node, want = family.node(), family.alone(prompt)
    family.assert_no_cache_says(prompt, want)
    for cached in (0, length - 1, length - 1):
        assert node.ask(prompt) == (cached, want)
    branch = [*prompt[:61], *text(30, seed=1)]
    longer = [*prompt, *want[0][0], *text(9, seed=2)]
    for other, cached in ((branch, 61), (longer, length + NEW - 1)):
        assert node.ask(other) == (cached, family.alone(other))
    assert node.ask(prompt) == (length - 1, want)
    if name != "phi3-long":  # where the whole of a shorter text is computed with the factors for longer ones
        family.assert_no_cache_says(branch, family.alone(branch))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_in_chunks_cached_and_preempted(families: Families, name: str) -> None:
    """A prompt that crosses the family's windows and scaling boundaries: in one chunk, in chunks, on a hit, and where
    its blocks are lost amid the prompt and again amid the answer, with a cache to go on from and without."""
    family, prompt = families(name), text(PROMPT_TOKENS)
    want = family.alone(prompt)
    family.assert_no_cache_says(prompt, want)
    node = family.node()
    for cached in (0, len(prompt) - 1):
        assert node.ask(prompt) == (cached, want)
    for options in ({}, {"no_read": True, "no_store": True}):
        node, lost = family.node(), list[int]()

        def lose(node: Served = node, lost: list[int] = lost) -> None:
            running = node.engine._loop._scheduler.running
            node.preempt_when(lambda: any(sequence.num_computed > 0 for sequence in running))
            lost.append(len(node.sink.tokens))
            node.preempt_when(lambda: len(node.sink.tokens.get((node.number, 0), ())) == NEW // 2)

        assert node.ask(prompt, interrupt=lose, **options)[1] == want
        assert lost == [0], "control: the first time no token had come"


def test_cached_and_no_cache_logits_together(families: Families) -> None:
    """Cold, cached and partly cached prompts in one batch, and one that stores nothing: each as alone."""
    family, shared = families("gemma3"), text(45)
    prompts = [[*shared, *text(3 + 11 * n, seed=n)] for n in range(6)]
    node = family.node(max_batch=8)
    node.ask(prompts[0])
    for number, prompt in enumerate(prompts):
        node.submit(request(100 + number, prompt, max_tokens=NEW, num_logprobs=3, no_store=number == 3))
    node.finish(*range(100, 106))
    for number, prompt in enumerate(prompts):
        key = (100 + number, 0)
        assert ((node.sink.tokens[key], node.sink.logprobs[key]),) == family.alone(prompt), number
        assert node.sink.cached[key[0]] == (len(prompt) - 1 if number == 0 else 45)
    node.assert_quiet()


# ---- positions around block boundaries


def test_positions_around_block_boundaries(families: Families) -> None:
    """Prompts that end one token before, at and after a boundary, with answers that cross the next one; then others
    that share exactly so much with them."""
    family = families("llama3")
    for length in (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1):
        node, prompt = family.node(), text(length, seed=length)
        want = family.alone(prompt, new=B + 2)
        family.assert_no_cache_says(prompt, want)
        for cached in (0, length - 1, length - 1):
            assert node.ask(prompt, new=B + 2) == (cached, want), length
        other = [*prompt, *((token + 1) % VOCABULARY for token in want[0][0][:1]), *text(4, seed=99)]
        assert node.ask(other) == (length, family.alone(other)), length


@pytest.mark.parametrize("length", [B, 2 * B + 5])
def test_positions_off_by_one_would_be_seen(families: Families, length: int) -> None:
    """The control: a hit that is told one token longer than it is gives another answer, or none."""
    family, prompt = families("llama3"), text(length)
    longer, node = [*prompt, *text(20, seed=3)], family.node()
    want = family.alone(longer)
    node.ask(prompt, new=1)
    node.spoil(lambda event: replace(event, cached_tokens=event.cached_tokens + 1))
    assert node.ask(longer)[1] != want


# ---- truncation, sliding window, rope scaling


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_truncation_reuses_only_what_stands_at_the_same_place(families: Families, name: str) -> None:
    """A prompt cut at its end is a hit to its last token but one; cut at its beginning, by a block or less, no hit at
    all, although most of its blocks hold the same tokens."""
    family, prompt = families(name), text(6 * B)
    node = family.node()
    node.ask(prompt)
    for cut in (1, B - 1, B, 2 * B + 3):
        shorter = prompt[:-cut]
        assert node.ask(shorter) == (len(shorter) - 1, family.alone(shorter)), cut
    for cut in (1, B, 2 * B):
        later = prompt[cut:]
        assert node.ask(later) == (0, family.alone(later)), cut
    assert node.ask(prompt) == (len(prompt) - 1, family.alone(prompt))


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_sliding_window_row_39(families: Families, name: str) -> None:
    """A window of three blocks, in every layer or in some: a prompt of eight blocks four times, one that leaves it in
    its last block, and answers longer than a window: all as without a cache."""
    family, prompt = families(name, sliding_window=3 * B), text(8 * B)
    want, new = family.alone(prompt, new=3 * B + 5), 3 * B + 5
    family.assert_no_cache_says(prompt, want)
    node = family.node()
    for cached in (0, 8 * B - 1, 8 * B - 1, 8 * B - 1):
        assert node.ask(prompt, new=new) == (cached, want)
    leaving = [*prompt[: 7 * B + 6], *text(10, seed=5)]
    assert node.ask(leaving, new=new) == (7 * B + 6, family.alone(leaving, new=new))
    assert node.ask(prompt, new=new) == (8 * B - 1, want)
    assert families(name, sliding_window=400).alone(prompt, new=new) != want, "control: the window matters here"


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_windows_in_some_layers_on_few_window_blocks(families: Families, name: str) -> None:
    """Prompts and answers of many windows, one after the other, on window blocks for little more than one window: what
    is cached and what is computed again, parting inside a block too, all says what is said without a cache."""
    family = families(name, sliding_window=3 * B)
    prompt, other = text(12 * B), text(11 * B, seed=3)
    prompts = [prompt, other, [*prompt[: 7 * B + 6], *text(10, seed=5)], [*other, *text(20, seed=6)], prompt[: 4 * B]]
    wanted = [family.alone(tokens, new=2 * B) for tokens in prompts]
    for tokens, want in zip(prompts, wanted, strict=True):
        family.assert_no_cache_says(tokens, want)
    node, cached = family.node(num_window_blocks=family.model.layout.window_reach + 4), []
    for _ in range(2):
        for tokens, want in zip(prompts, wanted, strict=True):
            found = node.ask(tokens, new=2 * B)
            assert found[1] == want
            cached.append(found[0])
    assert 0 < sum(cached) < sum(len(tokens) - 1 for tokens in prompts) * 2
    assert node.ask(prompt, new=2 * B)[1] == wanted[0]
    assert node.ask(prompt, new=2 * B) == (len(prompt) - 1, wanted[0])


ROPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "linear": ("llama3", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 0),
    "dynamic": ("llama3", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 256),
    "llama3": ("llama3", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, 0),
    "yarn": ("llama3", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                        "original_max_position_embeddings": 64}, 0),
    "longrope": ("phi3-long", FAMILIES["phi3-long"].values["rope_parameters"], 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(ROPES))
def test_rope_scaling_across_the_original_context(families: Families, kind: str) -> None:
    """A prompt below the original context of 64, then a hit on it that goes beyond, computed in chunks: the keys that
    were stored before are those that the longer prompt would have stored."""
    name, rope, context = ROPES[kind]
    changes: dict[str, Any] = {"rope_parameters": dict(rope), "max_position_embeddings": 64 if context else 256}
    if kind == "longrope":
        changes["original_max_position_embeddings"] = 64
    family, prompt = families(name, max_context=context, **changes), text(90)
    node, want = family.node(), family.alone(prompt, new=30)
    for part, cached in ((prompt[:50], 0), (prompt[:64], 50), (prompt[:65], 64)):
        assert node.ask(part, new=1) == (cached, family.alone(part, new=1))
    assert node.ask(prompt, new=30) == (65, want)
    assert node.ask(prompt, new=30) == (89, want)
    if kind != "dynamic":  # there the base follows from the configured context, and not from each text's length
        family.assert_no_cache_says(prompt, want)
    plain = families(name, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=256)
    assert plain.alone(prompt, new=30) != want, "control: the scaling matters here"


# ---- beam and speculative copy-on-write


def test_beam_copy_on_write(families: Families) -> None:
    """Four beams from a cached prompt that ends inside a block: as without a cache; blocks are copied where beams part,
    no published one changes, and the prompt's own answer stays what it was."""
    family, prompt = families("gemma3"), text(2 * B + 3)
    node, plain = family.node(), family.alone(prompt)
    want = family.alone(prompt, samples=4, beam=BeamParams(4, 1.0))
    assert len({tuple(tokens) for tokens, _ in want}) == 4
    assert node.ask(prompt) == (0, plain)
    before, copies = node.published(), node.manager.snapshot().cow_copies
    for _ in range(2):
        assert node.ask(prompt, samples=4, beam=BeamParams(4, 1.0)) == (len(prompt) - 1, want)
    assert node.manager.snapshot().cow_copies - copies >= 6
    after = node.published()
    assert len(before) >= 2 and before.items() <= after.items()
    assert node.ask(prompt) == (len(prompt) - 1, plain)


def test_beam_copies_that_are_left_out_would_be_seen(families: Families, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: where blocks are not copied, beams read what was never written."""
    family, prompt = families("gemma3"), text(2 * B + 3)
    want = family.alone(prompt, samples=4, beam=BeamParams(4, 1.0))
    node = family.node()
    node.ask(prompt)
    monkeypatch.setattr(family.model, "copy_blocks", lambda *arguments: None)
    assert node.ask(prompt, samples=4, beam=BeamParams(4, 1.0))[1] != want


def test_speculative_copy_on_write(families: Families) -> None:
    """Guesses, half of them wrong, behind a cached prompt that ends inside a block: the answers without guesses, no
    wrong guess in the index, no published block changed, and what a later prompt hits is right."""
    family, prompt = families("mistral"), text(3 * B + 5)
    speculation = SpeculationParams(SpeculationMode.PROMPT_LOOKUP, 6)
    node, plain = family.node(), family.alone(prompt, new=40)
    sampled = {"samples": 3, "temperature": 0.9, "seed": 4}
    many = family.alone(prompt, new=40, **sampled)
    assert node.ask(prompt, new=1) == (0, tuple((tokens[:1], values[:1]) for tokens, values in plain))
    before = node.published()
    for want, options in ((plain, {}), (many, sampled)):
        teller = Teller({node.number + 1: {s: tokens for s, (tokens, _) in enumerate(want)}}, 0.5)
        node.engine._loop._speculator._drafters[SpeculationMode.PROMPT_LOOKUP] = teller
        assert node.ask(prompt, new=40, speculation=speculation, **options) == (len(prompt) - 1, want)
        drafted, accepted = node.sink.drafts[node.number]
        assert 0 < accepted < drafted
    said = [[*prompt, *tokens] for tokens, _ in (*plain, *many)]
    listed = [tokens for tokens, _ in indexed(node)]
    assert listed and all(any(tokens == whole[: len(tokens)] for whole in said) for tokens in listed)
    assert before and before.items() <= node.published().items()
    longer = [*said[0], *text(5, seed=6)]
    assert node.ask(longer) == (len(said[0]) - 1, family.alone(longer))


# ---- prefix reuse across adapters and tenants


def adapted(family: Family, folder: Path, seed: int) -> tuple[AdapterUse, Family]:
    """A LoRA adapter of every module, and the family with its product in the weights of `transformers`."""
    shapes, layers = module_shapes(family.model.config), family.model.config.num_layers
    deltas = adapter_tensors(shapes, layers, 4, seed=seed)
    read = load_adapter(write_adapter(folder / str(seed), adapter_config(4), deltas), family.model.config)
    reference = copy.deepcopy(family.reference)
    plain = {name: value.numpy() for name, value in reference.state_dict().items()}
    reference.load_state_dict({name: torch.tensor(value) for name, value in merged(plain, deltas, 2.0).items()})
    return AdapterUse(family.model.pack_adapter(read.layers), read.digest), Family(reference, family.model)


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_prefix_reuse_across_adapters(families: Families, name: str, tmp_path: Path) -> None:
    """One prompt under the base and two adapters: none reads what another computed, each hits what it computed itself,
    in whole and in part, also when the same content is loaded again; another tenant hits nothing."""
    family, prompt = families(name), text(3 * B + 5)
    first, first_merged = adapted(family, tmp_path, 1)
    second, second_merged = adapted(family, tmp_path, 2)
    uses, node = (None, first, second), family.node(root=b"a" * 32)
    wanted = [family.alone(prompt, adapter=use) for use in uses]
    assert len({tuple(told[0][0]) for told in wanted}) == 3, "control: the adapters matter"
    for one, want in zip((family, first_merged, second_merged), wanted, strict=True):
        one.assert_no_cache_says(prompt, want)
    for cached in (0, len(prompt) - 1):
        for use, want in zip(uses, wanted, strict=True):
            assert node.ask(prompt, adapter=use) == (cached, want)
    branch = [*prompt[: 2 * B + 1], *text(20, seed=8)]
    for use in uses:
        assert node.ask(branch, adapter=use) == (2 * B + 1, family.alone(branch, adapter=use))
    again = AdapterUse(second.weights, second.digest)
    assert node.ask(prompt, adapter=again) == (len(prompt) - 1, wanted[2])
    other = Served(model=family.model, manager=node.manager, arena=node.arena, tenant="blau", root=b"b" * 32)
    for use, want in zip(uses, wanted, strict=True):
        assert other.ask(prompt, adapter=use) == (0, want)


def test_an_adapter_that_is_not_in_the_key_would_be_seen(
    families: Families, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: under one root for all, an adapter's answer begins with keys and values of the base."""
    family, prompt = families("llama3"), text(3 * B + 5)
    use, _ = adapted(family, tmp_path, 1)
    want = family.alone(prompt, adapter=use)
    monkeypatch.setattr(InProcessClient, "_root_of", lambda self, command: self._root)
    node = family.node()
    node.ask(prompt)
    cached, told = node.ask(prompt, adapter=use)
    assert cached == len(prompt) - 1
    assert told != want


def test_prefix_reuse_across_tenants(families: Families) -> None:
    """Two tenants' sessions on one pool: neither reads what the other computed, each hits what it computed itself;
    another session of the first tenant, the control, hits what the first one computed."""
    family, prompt = families("gemma3"), text(5 * B + 3)
    first, want = family.node(root=b"a" * 32), family.alone(prompt)

    def another(tenant: str, root: bytes) -> Served:
        return Served(model=family.model, manager=first.manager, arena=first.arena, tenant=tenant, root=root)

    other, same = another("blau", b"b" * 32), another("acme", b"a" * 32)
    assert first.ask(prompt) == (0, want)
    assert other.ask(prompt) == (0, want)
    for node in (first, other, same):
        assert node.ask(prompt) == (len(prompt) - 1, want)
    branch = [*prompt[: 2 * B + 1], *text(20, seed=8)]
    assert other.ask(branch) == (2 * B + 1, family.alone(branch))
    assert first.ask(branch) == (2 * B + 1, family.alone(branch))
    first.manager.evict(num_blocks=96)
    assert [node.ask(prompt)[0] for node in (other, same)] == [0, 0]


def test_each_wall_between_tenants_holds_alone(families: Families, tmp_path: Path) -> None:
    """The roots are those that the daemon derives from the tenants' secrets, all else in the key equal. Neither under
    another tenant's root alone nor as another tenant alone does anybody hit what is cached; under both, the control."""
    tenants = Tenants(TenantStore(tmp_path / "tenants.db"))
    key = CacheKey(b"weights", "", b"", b"tokenizer", b"", b"", "float32", "none", 1)
    acme, blau = (derive_root(tenants.secret(tenants.create_tenant(name, 1)), key) for name in ("acme", "blau"))
    family, prompt = families("gemma3"), text(3 * B + 3)
    first, want = family.node(tenant="acme", root=acme), family.alone(prompt)
    assert first.ask(prompt) == (0, want)

    def as_tenant(tenant: str, root: bytes) -> tuple[int, Told]:
        return Served(model=family.model, manager=first.manager, arena=first.arena, tenant=tenant, root=root).ask(
            prompt
        )

    assert as_tenant("blau", blau) == (0, want)
    assert as_tenant("acme", acme) == (len(prompt) - 1, want)
    first.manager.purge(TenantId("blau"))
    assert as_tenant("blau", acme) == (0, want), "the owner of a tree"
    assert as_tenant("acme", blau) == (0, want), "the secret in its root"


# ---- eviction never returns stale blocks


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_eviction_never_returns_stale_blocks(families: Families, name: str) -> None:
    """A pool for three of nine prompts, which share beginnings, asked in any order: some are hit, in whole or in part,
    and others have lost their blocks; each answer is the one without a cache."""
    family, chance = families(name), np.random.default_rng(11)
    trunks = [text(2 * B + 5, seed=20 + n) for n in range(3)]
    prompts = [[*trunks[n % 3], *text(3 + 7 * n, seed=30 + n)] for n in range(9)]
    want = [family.alone(prompt) for prompt in prompts]
    node, cached = family.node(14), []
    for _ in range(45):
        chosen = int(chance.zipf(1.4)) % 9
        hit, told = node.ask(prompts[chosen])
        assert told == want[chosen], chosen
        cached.append(len(prompts[chosen]) - 1 - hit)
    snapshot = node.manager.snapshot()
    assert snapshot.evictions > 20
    assert min(cached) == 0 and len(set(cached)) > 6, "control: whole hits, partial ones and misses"


def test_stale_blocks_would_be_seen(families: Families) -> None:
    """The control: a node that is handed the blocks which a prompt had before they were evicted does not answer as it
    should; and what is free is NaN, so that nobody could."""
    family, prompt = families("llama3"), text(4 * B)
    node, want, held = family.node(14), family.alone(prompt), []

    def stale(event: Acquired) -> Acquired:
        held.append(event.blocks.copy())
        if len(held) == 1:
            return event
        return replace(event, blocks=np.concatenate([held[0][:3], event.blocks[3:]]), cached_tokens=3 * B)

    node.spoil(stale)
    assert node.ask(prompt) == (0, want)
    node.manager.evict(num_blocks=14)
    assert (node.arena.view(np.uint8)[held[0]] == 0xFF).all()
    assert node.ask(prompt)[1] != want
