"""solo() of the cases: what a request says alone, on a node without prefix cache; and equality with it.

Owns the memo of solo runs. The solo node sees one request at a time and stores nothing, so each run is a fresh one.
"""

from __future__ import annotations

from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result, make_request
from tests.e2e.rig import Node

PROBE_TOKENS = list(range(40, 61))


class Solo:
    """Runs requests alone and remembers what they said."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._memo: dict[bytes, Result] = {}

    def __call__(self, request: pb.GenerateRequest) -> Result:
        """The result of `request` alone; cache flags, labels and guesses do not matter there."""
        plain = pb.GenerateRequest()
        plain.CopyFrom(request)
        plain.ClearField("cache")
        plain.ClearField("session")
        plain.ClearField("speculation")
        plain.ClearField("request_label")
        name = plain.SerializeToString(deterministic=True)
        if name not in self._memo:
            self._memo[name] = self.node.generate(plain)
            if self._memo[name].cached_tokens:
                raise AssertionError("the solo node served from a cache")
        return self._memo[name]

    def check(self, request: pb.GenerateRequest, result: Result) -> None:
        """Raises AssertionError where `result` is not Equal to its solo run: ids, text and reason of each sample."""
        expected = self(request)
        for index, sample in expected.samples.items():
            got = result.samples[index]
            if got.token_ids != sample.token_ids:
                at = next(
                    (i for i, (a, b) in enumerate(zip(got.token_ids, sample.token_ids, strict=False)) if a != b),
                    min(len(got.token_ids), len(sample.token_ids)),
                )
                raise AssertionError(
                    f"sample {index} differs from its solo run at token {at} of {len(sample.token_ids)} "
                    f"(prompt {result.prompt_tokens}, cached {result.cached_tokens}): "
                    f"{got.token_ids[at : at + 4]} instead of {sample.token_ids[at : at + 4]}"
                )
            if (got.text, got.reason, got.stop) != (sample.text, sample.reason, sample.stop):
                raise AssertionError(f"sample {index}: same tokens but another text or reason than alone")

    def probe(self, node: Node) -> None:
        """A node still serves: one small request, Equal to its solo run."""
        request = make_request(PROBE_TOKENS, new=4)
        self.check(request, node.generate(request))
