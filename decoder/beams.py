"""Beam groups: the sequences of one search, and how they fork, end, give way and come back together.

Owns which sequence computes which running hypothesis. Invariants: a round is made when every member's logits are there,
in whichever steps they came; of the hypotheses that go on from one member the first keeps its lease, the others are
forks of it at what is computed, so that blocks are shared and only the partly filled one is copied; members that nobody
goes on from are released before. Members hold blocks all together or not at all: where one gives way, loses its lease
or finds no room for a fork, the group starts again from what its hypotheses have in common, as one sequence with the
places of all. It has nothing to tell before the search is over. Called by the committer, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import Internal, ResourceExhausted
from decoder.beam_search import BeamSearch, Choice, Expansion
from decoder.cache_api import Fork
from decoder.outputs import EndReason
from decoder.requests import ActiveRequest, RequestTable
from decoder.runner import Work
from decoder.scheduler import Scheduler
from decoder.sequence import BeamParams, Sequence, SequenceId

if TYPE_CHECKING:
    from decoder.commit import Committer

Expansions = list[tuple[Sequence, Expansion | None]]


@dataclass(eq=False, slots=True)
class BeamGroup:
    """One search under way. `members` are the sequences of the running hypotheses, in order; before the first round,
    and after a restart, a single one that computes what all have in common. `restarted_at` are the tokens of a
    hypothesis at the last restart."""

    active: ActiveRequest
    params: BeamParams
    arrival: int
    search: BeamSearch
    members: list[Sequence] = field(default_factory=list)
    expansions: dict[SequenceId, Expansion] = field(default_factory=dict)
    is_restarting: bool = False
    restarted_at: int = 0


class Beams:
    """All beam groups of an engine."""

    def __init__(self, committer: Committer, scheduler: Scheduler, requests: RequestTable) -> None:
        self._committer = committer
        self._scheduler = scheduler
        self._requests = requests

    def open(self, active: ActiveRequest, params: BeamParams, arrival: int) -> Sequence:
        """The sequence that computes the prompt of a search; it takes the places of all its hypotheses."""
        request = active.request
        search = BeamSearch(params, request.stopping, request.sampling.bad_ids, request.num_logprobs)
        return self._begin(BeamGroup(active, params, arrival, search))

    def _begin(self, group: BeamGroup) -> Sequence:
        first = self._new_member(group, 0)
        first.places = group.params.width
        group.members = [first]
        group.expansions.clear()
        return first

    def _new_member(self, group: BeamGroup, slot: int) -> Sequence:
        member = self._committer.new_sequence(group.active, slot, group.arrival, is_trunk=False)
        member.group = group
        return member

    # ---- one step

    def expand(self, work: Work, logits: NDArray[np.float32]) -> Expansions:
        """The continuations of every member whose logits came back; None where they are not finite."""
        return [
            (sequence, group.search.expand(logits[row]))
            for sequence, row in work.sampled
            if (group := group_of(sequence)) is not None
        ]

    def commit(self, expansions: Expansions) -> list[Fork]:
        """The step has finished, and what it computed is counted: make the rounds that can be made."""
        forks: list[Fork] = []
        for sequence, expansion in expansions:
            group = group_of(sequence)
            if group is None or not group.active.is_open or sequence not in group.members:
                continue
            if expansion is None:
                self._committer.fail_sequence(sequence, Internal("the model gave numbers that are not finite"))
            elif group.is_restarting:
                forks += self._spread(group, sequence)
            else:
                group.expansions[sequence.sequence_id] = expansion
                if len(group.expansions) == len(group.members):
                    forks += self._round(group)
        return forks

    def _round(self, group: BeamGroup) -> list[Fork]:
        choices = group.search.advance([group.expansions[member.sequence_id] for member in group.members])
        group.expansions.clear()
        self._committer.count_generated(group.active.request, len(choices) or len(group.members))
        if not choices:
            self._tell(group)
            return []
        return self._go_on(group, choices, [[choice.token] for choice in choices])

    def _spread(self, group: BeamGroup, first: Sequence) -> list[Fork]:
        group.is_restarting = False
        common = first.num_generated
        choices = [Choice(0, hypothesis.tokens[-1]) for hypothesis in group.search.running]
        return self._go_on(group, choices, [list(item.tokens[common:]) for item in group.search.running])

    def _go_on(self, group: BeamGroup, choices: Rows[Choice], endings: Rows[list[int]]) -> list[Fork]:
        # The members of the next round: parents that keep their leases, and forks of them.
        parents = group.members
        heirs: dict[int, int] = {}
        for place, choice in enumerate(choices):
            heirs.setdefault(choice.parent, place)
        for index, parent in enumerate(parents):
            if index not in heirs:
                self._committer.leave(parent)
        slots = iter(sorted(set(range(group.params.width)) - {parents[index].sample for index in heirs}))
        members: list[Sequence] = []
        branches: dict[int, list[Sequence]] = {}
        for place, choice in enumerate(choices):
            parent = parents[choice.parent]
            if heirs[choice.parent] == place:
                members.append(parent)
                continue
            branch = self._new_member(group, next(slots))
            branch.begin_as(parent)
            branches.setdefault(choice.parent, []).append(branch)
            members.append(branch)
        group.members = members
        for member, ending in zip(members, endings, strict=True):
            member.places = 1
            for token in ending:
                member.append_token(token)
        wanted = len(members) - len(heirs)
        promised = self._scheduler.promise_places(wanted)
        leases = [(index, lease) for index in branches if (lease := parents[index].lease) is not None]
        if promised < wanted or len(leases) < len(branches):
            self._scheduler.drop_promise(promised)
            self.restart([group])
            return []
        return [self._committer.fork(parents[index], lease, branches[index]) for index, lease in leases]

    # ---- the end

    def _tell(self, group: BeamGroup) -> None:
        active = group.active
        self._committer.end_request(active)
        for index, hypothesis in enumerate(group.search.finished[: active.request.sampling.num_samples]):
            if index not in active.open_samples:
                continue
            logprobs = hypothesis.logprobs or (None,) * len(hypothesis.tokens)
            for token, logprob in zip(hypothesis.tokens, logprobs, strict=True):
                self._requests.gain(active, index, token, logprob)
            reason = EndReason.LENGTH if hypothesis.stop_id is None else EndReason.STOP
            self._requests.end_sample(active, index, reason, hypothesis.stop_id)
        if active.is_open:
            self._committer.fail_request(active, Internal("the search found fewer answers than were asked for"))

    # ---- giving way

    def restart(self, groups: Iterable[BeamGroup]) -> None:
        """The groups give up every block they hold and wait as one sequence each; what they found stays."""
        for group in groups:
            if not group.active.is_open:
                continue
            self._committer.end_request(group.active)
            running = group.search.running
            total = len(group.active.request.prompt) + len(running[0].tokens)
            common = _num_common([item.tokens for item in running])
            shared = total - len(running[0].tokens) + common
            error = self._outgrown(group, shared, total)
            group.restarted_at = total
            if error is not None:
                self._committer.fail_request(group.active, error)
                continue
            first = self._begin(group)
            first.admitted = True
            group.is_restarting = bool(running[0].tokens)
            for token in running[0].tokens[:common]:
                first.append_token(token)
            self._scheduler.enqueue(first)

    def _outgrown(self, group: BeamGroup, num_shared: int, num_tokens: int) -> ResourceExhausted | None:
        """What is said of beams of `num_tokens` tokens that no pool of this size can hold, of either kind of blocks.

        Window blocks are fewer, and beams part late: there it is said of those that came no further than before.
        """
        scheduler, width = self._scheduler, group.params.width
        needed = blocks_of_group(scheduler.block_tokens, num_shared, num_tokens, width)
        subject, name, usable = "blocks", "blocks", scheduler.num_blocks
        if needed <= usable and scheduler.windows.grouped and group.restarted_at == num_tokens:
            passed = scheduler.windows.passed_by(num_tokens - 1)
            whole = max(num_shared // scheduler.block_tokens, passed)
            needed = whole - passed + width * (scheduler.blocks_for(num_tokens) - whole)
            subject, name, usable = "window_blocks", "window blocks", scheduler.num_window_blocks
        if needed <= usable:
            return None
        return ResourceExhausted(
            f"the beams grew to {needed} {name}; the pool has {usable}",
            subject=subject, needed=needed, usable=usable, reason="EXCEEDS_POOL",
        )  # fmt: skip


def group_of(sequence: Sequence) -> BeamGroup | None:
    """The beam group that a sequence is a member of."""
    return sequence.group if isinstance(sequence.group, BeamGroup) else None


def groups_of(sequences: Iterable[Sequence]) -> list[BeamGroup]:
    """The beam groups of these sequences, each once."""
    return list(dict.fromkeys(group for sequence in sequences if (group := group_of(sequence)) is not None))


def blocks_of_group(block_tokens: int, num_shared: int, num_tokens: int, width: int) -> int:
    """Blocks for `width` sequences of `num_tokens` tokens whose first `num_shared` are the same."""
    whole = num_shared // block_tokens
    return whole + width * (-(-num_tokens // block_tokens) - whole)


def _num_common(rows: list[tuple[int, ...]]) -> int:
    # How many first tokens all have in common, the last of them excepted, as its logits are wanted again.
    shortest = min(len(row) for row in rows)
    for place in range(shortest - 1):
        if len({row[place] for row in rows}) > 1:
            return place
    return max(0, shortest - 1)
