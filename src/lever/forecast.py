"""What a cycle with a draft will take and bring, before there was one. Arithmetic on profiles; measures nothing.

The costs are those that a run starts with (`lever.cycle_cost`), and what is drafted and checked is what the preset's
own rules choose. Only the draft is made up: one whose first guess is right with the same probability everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from lever.cost import Profile, RowTime, layer_seconds, pass_time, projection_seconds, read_bytes_per_s
from lever.cycle_cost import CycleCost, Foretold
from lever.policies import Preset, Situation, gain
from lever.tree import IN_TEXT, DraftTree

ROWS = (1, 2, 4, 8, 16, 24, 32, 48)  # of a pass over a tree: points of the tables
# Of a target's token that is not a draft's first guess. Measured with the demo pair: first guesses right .90 (math) and
# .83 (chat), among the first two .96 and .93, among the first four .99 and .96. In both the second guess gets about
# this share of first * (1 - first), the third and the fourth get this one each.
SECOND, THIRD, FOURTH = 0.7, 0.14, 0.14
MOST_FIRST = 0.99  # of an agreement that is told from tokens per cycle


@dataclass(frozen=True, slots=True)
class Streamed:
    """Bytes that a pass over the layers reads, and those that the logits of a row read."""

    layers: int
    projection: int


def foretell(
    profile: Profile, streamed: Streamed, steps: Sequence[RowTime], counts: Sequence[int], most_rows: int
) -> Foretold:
    """What a profile and measured draft steps say of cycles with these numbers of threads."""
    share = streamed.layers / (profile.n_layers * profile.layer_bytes)
    few = min(counts)
    rate = read_bytes_per_s(profile, 1, few)
    plain = pass_time(profile, 1, few, streamed.layers + streamed.projection)
    rows = [count for count in ROWS if count <= max(most_rows, 1)]
    bands_s = streamed.projection / rate
    compute = {n: {r: profile.n_layers * layer_seconds(profile, r, n, share) for r in rows} for n in counts}
    return Foretold(
        compute=compute,
        read_s=streamed.layers / rate,
        rest_s=max(plain.seconds - max(plain.reads_s, plain.compute_s), 0.0),
        project={n: max(projection_seconds(profile, 1, n), bands_s) for n in counts},
        draft=_by_threads(steps, counts),
    )


def _by_threads(steps: Sequence[RowTime], counts: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
    """As they were measured; numbers of threads that were not are left out."""
    tables: dict[int, dict[int, float]] = {}
    for step in steps:
        if step.threads in counts:
            tables.setdefault(step.threads, {})[step.rows] = step.seconds.median
    return tables


# --- a draft that is made up --------------------------------------------------------------------------------


def guesses(first: float) -> tuple[float, ...]:
    """Probabilities of a draft's candidates, of which the first is right in this share of all places."""
    return (first, *(share * first * (1 - first) for share in (SECOND, THIRD, FOURTH)))


def tokens_of_best(first: float, n: int) -> float:
    """Tokens that a pass brings on average which checks the root and the n - 1 likeliest nodes."""
    reach, tokens = [-1.0], 0.0
    for _ in range(n):
        likeliest = -heappop(reach)
        tokens += likeliest
        for share in guesses(first):
            heappush(reach, -likeliest * share)
    return tokens


def agreement(tokens: float, rows: float) -> float:
    """The share of first guesses that must be right, where passes over so many rows brought so many tokens each."""
    low, high = 0.0, MOST_FIRST
    n = int(rows)
    for _ in range(20):
        middle = (low + high) / 2
        few, more = tokens_of_best(middle, n), tokens_of_best(middle, n + 1)
        low, high = (middle, high) if few + (rows - n) * (more - few) < tokens else (low, middle)
    return (low + high) / 2


# --- a cycle ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a cycle is expected to be."""

    tokens: float
    rows: int
    steps: int  # of the draft
    draft_s: float
    pass_s: float
    project_s: float  # of all its tokens
    threads: int  # of the pass

    @property
    def seconds(self) -> float:
        return self.draft_s + self.pass_s + self.project_s


def expected_cycle(preset: Preset, cost: CycleCost, first: float, most_rows: int) -> Cycle:
    """A cycle of a preset that starts with nothing drafted, not even what a tree before it left."""
    candidates = list(enumerate(guesses(first)))
    tree, draft_s, steps = DraftTree.rooted_at(0), cost.draft_s(1), 1
    tree.expand(0, IN_TEXT, candidates)  # the root's own step
    while nodes := preset.grow(Situation(tree, cost, draft_s, most_rows)):
        draft_s, steps = draft_s + cost.draft_s(len(nodes)), steps + 1
        for node in nodes:
            tree.expand(node, steps, candidates)
    rows = preset.select(Situation(tree, cost, draft_s, most_rows))
    tokens, n = gain(tree, rows), len(rows)
    return Cycle(tokens, n, steps, draft_s, cost.pass_s(n), tokens * cost.project_s(), cost.threads(n))
