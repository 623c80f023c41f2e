"""How each preset grows a tree and what it checks of it, with a draft and with costs that are written down."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import combinations, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lever.cycle_cost import CycleCost
from lever.errors import UsageError
from lever.policies import (
    CONFIDENT,
    DEPTH,
    FIRST_ALPHA,
    LEAST_ALPHA,
    MOST_ALPHA,
    MOST_BRANCHES,
    PRESETS,
    Grow,
    Select,
    Situation,
    algorithm_1,
    alpha,
    best_nodes,
    branches,
    by_levels,
    expanded,
    gain,
    go_on,
    grow_while_it_pays,
    likeliest,
    likeliest_branches,
    most_worth,
    navigate,
    preset,
)
from lever.tree import IN_TEXT, DraftTree, reroot

Path = tuple[int, ...]
Draft = Callable[[Path], list[tuple[int, float]]]  # tokens behind the root -> candidates


def guesses(seed: int, n: int = 4) -> Draft:
    """A draft whose candidates behind a path are random, and the same each time."""

    def draft(path: Path) -> list[tuple[int, float]]:
        rng = random.Random(f"{seed} {path}")
        weights = sorted((rng.random() ** 3 for _ in range(n + 1)), reverse=True)
        return [(token, weight / sum(weights)) for token, weight in enumerate(weights[:n])]

    return draft


def sure(share: float, n: int = 4) -> Draft:
    """A draft whose first choice always has this probability; the others share the rest."""
    return lambda _path: [(0, share), *((token, (1 - share) / (n - 1)) for token in range(1, n))]


def cost(
    *, read_s: float = 0.4, row_s: float = 0.02, draft_s: float = 0.01, project_s: float = 0.01, most: int = 128
) -> CycleCost:
    """A machine on which rows compute in proportion; the knee is where they take as long as the reads."""
    found = CycleCost()
    for rows in (1, most):
        found.observe_pass(rows, max(read_s, rows * row_s), rows * row_s, read_s)
    found.observe_draft(1, draft_s)
    found.observe_draft(128, draft_s)  # however many at once
    found.observe_project(1, project_s)
    return found


@dataclass
class Cycle:
    """Grows a tree as the engine does, and notes the steps."""

    draft: Draft
    cost: CycleCost = field(default_factory=cost)
    most_rows: int = 64
    tree: DraftTree = field(default_factory=lambda: DraftTree.rooted_at(0))
    steps: list[list[int]] = field(default_factory=list)
    spent_s: float = 0.0
    room: int = DEPTH + 1
    outcomes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tree.expanded(0):
            self.tree.expand(0, IN_TEXT, self.draft(()))

    @property
    def situation(self) -> Situation:
        return Situation(self.tree, self.cost, self.spent_s, self.most_rows, self.room, self.outcomes)

    def grow(self, grow: Grow) -> Cycle:
        while nodes := grow(self.situation):
            assert len(set(nodes)) == len(nodes)
            self.steps.append(nodes)
            self.spent_s += self.cost.draft_s(len(nodes))
            for node in nodes:
                self.tree.expand(node, len(self.steps), self.draft(self.path(node)))
        return self

    def path(self, node: int) -> Path:
        return tuple(self.tree.tokens[at] for at in self.tree.path(node))

    def selected(self, select: Select) -> set[Path]:
        """Paths of the nodes that are checked: each once, all parents and the root among them."""
        nodes = select(self.situation)
        assert len(nodes) == len(set(nodes)) <= self.most_rows
        assert {self.tree.parents[node] for node in nodes} <= {*nodes, -1}
        assert 0 in nodes
        return {self.path(node) for node in nodes}


def per_depth(paths: set[Path]) -> list[int]:
    counts = Counter(map(len, paths))
    return [counts[depth] for depth in range(max(counts) + 1)]


# --- the table ----------------------------------------------------------------------------------------------


def test_presets_are_found_by_name_and_an_unknown_one_names_them_all() -> None:
    assert {name: preset(name).name for name in PRESETS} == {name: name for name in PRESETS}
    with pytest.raises(UsageError, match=r"no preset 'leaver': there are flash-ar, .*lever") as caught:
        preset("leaver")
    assert caught.value.exit_code == 2


def test_all_presets_but_plain_decoding_draft() -> None:
    assert [name for name in PRESETS if not PRESETS[name].drafts] == ["flash-ar"]


def test_levers_own_presets_prune_and_those_of_others_do_not() -> None:
    assert [name for name in PRESETS if PRESETS[name].prunes] == ["lever-paper", "lever"]


def test_plain_decoding_checks_the_root_alone() -> None:
    cycle = Cycle(guesses(1)).grow(preset("flash-ar").grow)
    assert cycle.steps == []
    assert cycle.selected(preset("flash-ar").select) == {()}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("most_rows", [1, 2, 5, 17])
def test_no_preset_checks_more_than_a_pass_takes(name: str, most_rows: int) -> None:
    cycle = Cycle(guesses(2), most_rows=most_rows).grow(preset(name).grow)
    assert len(cycle.selected(preset(name).select)) <= most_rows


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_needs_a_draft_that_says_anything(name: str) -> None:
    cycle = Cycle(lambda _path: []).grow(preset(name).grow)
    assert cycle.steps == []
    assert cycle.selected(preset(name).select) == {()}


def random_tree(seed: int, n_steps: int) -> DraftTree:
    """What a draft and a target may leave behind: grown anywhere, likely and unlikely, perhaps taken along a path."""
    rng, draft = random.Random(seed), guesses(seed, 3)
    tree = DraftTree.rooted_at(0)
    tree.expand(0, IN_TEXT, draft(()))
    for slot in range(n_steps):
        node = rng.choice(tree.frontier()) if rng.random() < 0.5 else len(tree) - rng.randint(1, 3)
        if not tree.expanded(node):
            tree.expand(node, slot, draft(tuple(tree.tokens[at] for at in tree.path(node))))
    if rng.random() < 0.5:
        tree = reroot(tree, [1], 0).tree
    return tree


@pytest.mark.parametrize("name", PRESETS)
@given(seed=st.integers(0, 10**6), room=st.integers(1, 12), n_steps=st.integers(0, 20), most_rows=st.integers(1, 48))
@settings(deadline=None, max_examples=25)
def test_no_preset_checks_or_drafts_what_can_not_become_text(
    name: str, seed: int, room: int, n_steps: int, most_rows: int
) -> None:
    """A cycle gives one token more than the depth it reaches. Whatever tree it finds, and however it goes on."""
    cycle = Cycle(guesses(seed, 3), cost(draft_s=1e-4), most_rows, random_tree(seed, n_steps), room=room)
    policy = preset(name)
    for growing in (policy.grow, policy.meanwhile):
        for _ in range(40 if growing else 0):
            assert growing is not None
            nodes = growing(cycle.situation)
            if not nodes:
                break
            assert max(cycle.tree.depths[node] for node in nodes) < max(room - 1, 1)
            for node in nodes:
                cycle.tree.expand(node, 0, cycle.draft(cycle.path(node)))
        checked = cycle.selected(policy.select)
        assert max(map(len, checked)) <= room - 1


# --- fixed shapes -------------------------------------------------------------------------------------------


def test_chain_sd_is_the_eight_likeliest_tokens_in_a_row() -> None:
    cycle = Cycle(guesses(3)).grow(preset("chain-sd").grow)
    assert cycle.selected(preset("chain-sd").select) == {(0,) * depth for depth in range(9)}
    assert [len(step) for step in cycle.steps] == [1] * 7  # the eighth token needs no step


def test_specinfer_has_its_widths_by_depth_and_drafts_a_level_at_once() -> None:
    cycle = Cycle(guesses(4)).grow(preset("specinfer").grow)
    found = cycle.selected(preset("specinfer").select)
    assert per_depth(found) == [1, 1, 1, 3, 3, 3, 3, 3, 3]
    assert {path for path in found if len(path) == 3} == {(0, 0, 0), (0, 0, 1), (0, 0, 2)}
    assert [len(step) for step in cycle.steps] == [1, 1, 3, 3, 3, 3, 3]


def test_levels_take_up_what_lives_of_an_older_tree() -> None:
    grow, select = by_levels([2, 1])
    cycle = Cycle(guesses(5))
    node = cycle.tree.children[0][1]
    cycle.tree.expand(node, 0, cycle.draft((1,)))
    cycle.grow(grow)
    assert cycle.steps == [[cycle.tree.children[0][0]]]
    assert cycle.selected(select) == {(), (0,), (1,), (0, 0), (1, 0)}


def every_path(draft: Draft, depth: int) -> dict[Path, float]:
    """All paths of so many tokens at most, with their probabilities."""
    found: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]
    for _ in range(depth):
        children: dict[Path, float] = {
            (*path, token): found[path] * share for path in level for token, share in draft(path)
        }
        found |= children
        level = list(children)
    return found


@given(seed=st.integers(0, 10**6), n=st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_opt_tree_is_the_set_with_the_largest_sum_by_brute_force(seed: int, n: int) -> None:
    draft = guesses(seed, 3)
    grow, select = best_nodes(n)
    found = Cycle(draft).grow(grow).selected(select)
    paths = every_path(draft, n)
    assert found == set(sorted(paths, key=lambda path: -paths[path])[:n])


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_opt_tree_has_the_26_nodes_that_a_search_one_by_one_finds(seed: int) -> None:
    draft = guesses(seed, 8)
    cycle = Cycle(draft).grow(preset("opt-tree").grow)
    assert cycle.selected(preset("opt-tree").select) == set(one_by_one(draft, 26))
    assert len(cycle.steps) < 26


def one_by_one(draft: Draft, n: int) -> Iterator[Path]:
    """The likeliest paths, each found from its parent."""
    order = count()
    frontier: list[tuple[float, int, Path]] = [(-1.0, next(order), ())]
    for _ in range(n):
        share, _, path = heappop(frontier)
        yield path
        for token, probability in draft(path):
            heappush(frontier, (share * probability, next(order), (*path, token)))


def test_a_draft_that_is_always_sure_is_not_asked_without_end() -> None:
    grow, _ = best_nodes(200)
    assert len(Cycle(lambda _path: [(0, 1.0)], most_rows=300).grow(grow).steps) < DEPTH
    lever = Cycle(lambda _path: [(0, 1.0)], cost(row_s=1e-3, draft_s=0.0), most_rows=300).grow(preset("lever").grow)
    assert len(lever.steps) < DEPTH
    assert max(lever.tree.depths) == DEPTH


# --- gain and cost ------------------------------------------------------------------------------------------


def rate(cycle: Cycle, nodes: list[int]) -> float:
    """Tokens a second of a cycle that checks these."""
    tokens = gain(cycle.tree, nodes)
    seconds = cycle.spent_s + cycle.cost.pass_s(len(nodes)) + tokens * cycle.cost.project_s()
    return tokens / seconds


def random_cycle(seed: int, n: int, n_steps: int) -> Cycle:
    rng = random.Random(seed)
    machine = cost(read_s=rng.choice([0.0, 0.05, 0.4]), row_s=rng.choice([0.01, 0.1, 0.3]), project_s=rng.random() / 20)
    cycle = Cycle(guesses(seed, n), machine)
    cycle.spent_s = rng.choice([0.0, 0.1])
    for slot in range(n_steps):
        node = rng.choice(cycle.tree.frontier())
        cycle.tree.expand(node, slot, cycle.draft(cycle.path(node)))
    return cycle


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_most_worth_is_the_best_set_of_all_by_brute_force(seed: int) -> None:
    """Of every set that has the parents of its nodes, not only of those of the likeliest."""
    cycle = random_cycle(seed, 2, 3)
    tree = cycle.tree
    others = range(1, len(tree))
    sets = [[0, *some] for size in range(len(tree)) for some in combinations(others, size)]
    closed = [nodes for nodes in sets if all(tree.parents[node] in nodes for node in nodes[1:])]
    best = max(rate(cycle, nodes) for nodes in closed)
    assert rate(cycle, most_worth(cycle.situation)) == pytest.approx(best)


@given(seed=st.integers(0, 10**6), most_rows=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_most_worth_is_the_best_number_of_nodes_by_brute_force(seed: int, most_rows: int) -> None:
    cycle = random_cycle(seed, 6, 8)
    cycle.most_rows = most_rows
    found = cycle.selected(most_worth)
    rates = [rate(cycle, cycle.tree.best(n)) for n in range(1, min(most_rows, len(cycle.tree)) + 1)]
    assert rates[len(found) - 1] == pytest.approx(max(rates))


def tree_of_four() -> DraftTree:
    """Reached with 1, .5, .4 and, behind the third, .2."""
    tree = DraftTree.rooted_at(0)
    tree.expand(0, IN_TEXT, [(1, 0.5), (2, 0.4)])
    tree.expand(2, 0, [(3, 0.5)])
    return tree


def test_the_likeliest_are_as_many_as_have_the_best_rate_which_is_told() -> None:
    asked: list[tuple[int, float]] = []

    def rate_of(n: int, tokens: float) -> float:
        asked.append((n, tokens))
        return {1: 1.0, 2: 3.0, 3: 2.0, 4: 3.0}[n]

    assert likeliest(Situation(tree_of_four(), cost(), 0.0, 8), rate_of) == ([0, 1], 3.0)  # as good with fewer
    assert [n for n, _ in asked] == [1, 2, 3, 4]
    assert [tokens for _, tokens in asked] == pytest.approx([1.0, 1.5, 1.9, 2.1])


def test_the_likeliest_are_no_more_than_a_pass_takes_and_no_deeper_than_the_text_may_go() -> None:
    def by_tokens(most_rows: int, room: int) -> list[int]:
        return likeliest(Situation(tree_of_four(), cost(), 0.0, most_rows, room), lambda _n, tokens: tokens)[0]

    assert by_tokens(most_rows=8, room=9) == [0, 1, 2, 3]
    assert by_tokens(most_rows=2, room=9) == [0, 1]
    assert by_tokens(most_rows=8, room=2) == [0, 1, 2]
    assert by_tokens(most_rows=8, room=1) == [0]


def test_of_nodes_that_bring_nothing_the_root_is_left() -> None:
    assert likeliest(Situation(tree_of_four(), cost(), 0.0, 8), lambda _n, _tokens: 0.0) == ([0], 0.0)


@given(seed=st.integers(0, 10**6), most_rows=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_most_worth_are_the_likeliest_at_the_rate_of_a_whole_pass(seed: int, most_rows: int) -> None:
    cycle = random_cycle(seed, 6, 8)
    cycle.most_rows = most_rows

    def rate_of(n: int, tokens: float) -> float:
        return tokens / (cycle.spent_s + cycle.cost.pass_s(n) + tokens * cycle.cost.project_s())

    nodes, best = likeliest(cycle.situation, rate_of)
    assert nodes == most_worth(cycle.situation)
    assert best == pytest.approx(rate(cycle, nodes))


def test_before_the_first_pass_nothing_is_drafted_and_the_root_alone_is_checked() -> None:
    cycle = Cycle(sure(0.9), CycleCost()).grow(preset("lever").grow)
    assert cycle.steps == []
    assert cycle.selected(preset("lever").select) == {()}


@pytest.mark.parametrize("knee", [8, 20, 33])
def test_lever_fills_rows_up_to_the_knee_and_not_beyond(knee: int) -> None:
    """Rows are nearly free up to there; beyond, time goes in proportion, and no candidate is worth that."""
    machine = CycleCost()
    machine.observe_pass(knee, 0.4, 0.4, 0.4)
    machine.observe_pass(2 * knee, 0.8, 0.8, 0.4)
    cycle = Cycle(sure(0.7, 8), machine)
    for slot in range(8):
        node = cycle.tree.frontier()[0]
        cycle.tree.expand(node, slot, cycle.draft(cycle.path(node)))
    assert len(cycle.tree) > 50
    assert 0.7 * knee < len(cycle.selected(preset("lever").select)) <= knee  # at the knee itself reads wait, too


def test_lever_checks_all_there_is_before_the_knee() -> None:
    cycle = Cycle(sure(0.7, 8), cost(read_s=0.4, row_s=0.001))
    assert len(cycle.selected(preset("lever").select)) == len(cycle.tree) == 9


def test_lever_does_not_draft_at_all_when_a_step_takes_longer_than_it_brings() -> None:
    assert Cycle(sure(0.9), cost(draft_s=10.0)).grow(preset("lever").grow).steps == []


def test_lever_does_not_draft_when_the_draft_knows_nothing() -> None:
    """A thousand tokens as likely as each other, and a step that costs a tenth of a pass."""
    draft: Draft = lambda _path: [(token, 0.001) for token in range(8)]  # noqa: E731  a table, in one line
    assert Cycle(draft, cost(draft_s=0.04)).grow(preset("lever").grow).steps == []


def test_lever_goes_on_while_drafting_is_cheap_and_stops_sooner_the_dearer_it_is() -> None:
    steps = [
        len(Cycle(sure(0.8), cost(draft_s=dear)).grow(preset("lever").grow).steps) for dear in (1e-6, 0.03, 0.1, 1)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 10
    assert 0 < steps[2] < steps[1] < steps[0]
    assert steps[3] == 0


def test_lever_tries_a_step_when_it_does_not_know_what_one_takes() -> None:
    machine = CycleCost()
    machine.observe_pass(1, 0.4, 0.02, 0.4)
    assert Cycle(sure(0.9), machine).grow(preset("lever").grow).steps != []


def test_lever_drafts_the_likeliest_nodes_one_two_four_or_eight_in_a_step() -> None:
    cycle = Cycle(guesses(7), cost(draft_s=0.002))
    frontiers = []

    def grow(now: Situation) -> list[int]:
        frontiers.append(now.tree.frontier())
        return grow_while_it_pays(now)

    cycle.grow(grow)
    assert len(cycle.steps) > 3
    assert {len(step) for step in cycle.steps} <= {1, 2, 4, 8}
    assert cycle.steps == [frontier[: len(step)] for step, frontier in zip(cycle.steps, frontiers, strict=False)]


@pytest.mark.parametrize(("more_s", "width"), [(0.0, 8), (0.01, 8), (1.0, 1)])
def test_lever_drafts_as_many_in_a_step_as_pay_for_the_time_that_they_add(more_s: float, width: int) -> None:
    machine = CycleCost()
    machine.observe_pass(1, 0.4, 0.02, 0.4)
    for nodes in (1, 2, 4, 8):
        machine.observe_draft(nodes, 0.02 * (1 + more_s * (nodes - 1)))
    tree = Cycle(lambda _path: [(0, 0.5), *((token, 0.01) for token in range(1, 8))], machine).tree
    assert len(grow_while_it_pays(Situation(tree, machine, 0.0, 48))) == width


@pytest.mark.parametrize("share", [1.0, 0.99, 0.9])
@pytest.mark.parametrize("row_s", [0.0, 0.05], ids=["free rows", "dear rows"])
def test_lever_goes_on_from_a_sure_node_though_its_siblings_are_not_worth_a_row(share: float, row_s: float) -> None:
    """What follows it takes a row of its own, not that of the node itself."""
    machine = CycleCost()
    machine.observe_pass(1, 0.2 + row_s, 0.2 + row_s, 0.0)
    machine.observe_pass(50, 0.2 + 50 * row_s, 0.2 + 50 * row_s, 0.0)
    machine.observe_draft(1, 0.001)
    machine.observe_draft(8, 0.002)
    cycle = Cycle(sure(share), machine).grow(preset("lever").grow)
    assert max(map(len, cycle.selected(preset("lever").select))) >= 5


def test_lever_takes_nothing_for_granted_of_what_a_full_tree_checks_already() -> None:
    """With every row taken, a node is worth a step only if its successors are likelier than the weakest row."""
    cycle = Cycle(sure(0.4, 8), cost(draft_s=1e-9), most_rows=4).grow(preset("lever").grow)
    weakest = min(cycle.tree.reach[node] for node in most_worth(cycle.situation))
    assert max(cycle.tree.reach[node] for node in cycle.tree.frontier()) <= weakest / 0.85


# --- the paper's algorithm ----------------------------------------------------------------------------------


def as_the_paper_has_it(draft: Draft, cost: CycleCost, most_depth: int) -> set[Path]:
    """Algorithm 1 word for word, over paths: no tree, no state, all sums made anew in each round."""
    inserted: list[Path] = [()]

    @cache
    def reach(path: Path) -> float:
        found = 1.0
        for place, token in enumerate(path):
            found *= dict(draft(path[:place]))[token]
        return found

    def cycle_s(n_nodes: int) -> float:
        return (n_nodes - 1) * cost.draft_s(1) + cost.pass_s(n_nodes)

    while True:
        frontier = [
            (*path, token)
            for path in inserted
            for token, _ in draft(path)
            if (*path, token) not in inserted and len(path) < most_depth
        ]
        if not frontier:
            return set(inserted)
        best = max(frontier, key=reach)
        more_s = cycle_s(len(inserted) + 1) - cycle_s(len(inserted))
        if reach(best) / more_s <= sum(map(reach, inserted)) / cycle_s(len(inserted)):
            return set(inserted)
        inserted.append(best)


@given(
    seed=st.integers(0, 10**6),
    read_s=st.sampled_from([0.0, 0.05, 0.4]),
    row_s=st.sampled_from([0.001, 0.02, 0.2]),
    draft_s=st.sampled_from([0.005, 0.02, 0.1]),
    room=st.integers(2, 9),
)
@settings(deadline=None, max_examples=40)
def test_lever_paper_checks_what_algorithm_1_inserts(
    seed: int, read_s: float, row_s: float, draft_s: float, room: int
) -> None:
    draft, machine = guesses(seed, 3), cost(read_s=read_s, row_s=row_s, draft_s=draft_s)
    cycle = Cycle(draft, machine, most_rows=200, room=room).grow(algorithm_1)
    assert cycle.selected(expanded) == as_the_paper_has_it(draft, machine, most_depth=room - 2)
    assert all(len(step) == 1 for step in cycle.steps)


def test_algorithm_1_inserts_nothing_before_it_knows_what_a_pass_takes() -> None:
    cycle = Cycle(sure(0.9), CycleCost()).grow(algorithm_1)
    assert cycle.selected(expanded) == {()}


def test_what_algorithm_1_checks_is_what_the_draft_was_asked_about_and_the_root() -> None:
    tree = DraftTree.rooted_at(0)
    assert expanded(Situation(tree, cost(), 0.0, 8)) == [0]
    tree.expand(0, IN_TEXT, [(1, 0.5), (2, 0.4)])
    tree.expand(2, 0, [(3, 0.5)])
    tree.expand(3, 1, [(4, 0.5)])
    assert expanded(Situation(tree, cost(), 0.0, 8)) == [0, 2, 3]
    assert expanded(Situation(tree, cost(), 0.0, 2)) == [0, 2]


# --- EdgeLLM ------------------------------------------------------------------------------------------------


def test_alpha_halves_after_a_cycle_that_was_accepted_whole() -> None:
    assert alpha([]) == FIRST_ALPHA
    assert alpha([(4, 4)]) == FIRST_ALPHA / 2
    assert alpha([(4, 4), (1, 1)]) == FIRST_ALPHA / 4


@pytest.mark.parametrize(("outcome", "factor"), [((4, 0), 2.0), ((4, 2), 2**0.5), ((4, 3), 2**0.25), ((8, 6), 2**0.25)])
def test_alpha_is_raised_by_the_share_that_was_wrong(outcome: tuple[int, int], factor: float) -> None:
    assert alpha([outcome]) == pytest.approx(factor * FIRST_ALPHA)
    assert alpha([(2, 2), outcome]) == pytest.approx(factor * FIRST_ALPHA / 2)


def test_a_cycle_that_checked_nothing_says_nothing_of_alpha() -> None:
    assert alpha([(0, 0), (4, 4), (0, 0)]) == FIRST_ALPHA / 2


def test_alpha_stays_within_bounds_and_comes_back_from_them_at_once() -> None:
    assert alpha([(3, 3)] * 100) == LEAST_ALPHA
    assert alpha([(3, 0)] * 100) == MOST_ALPHA
    assert alpha([(3, 3)] * 100 + [(3, 0)]) == 2 * LEAST_ALPHA
    assert alpha([(3, 0)] * 100 + [(3, 3)]) == MOST_ALPHA / 2


def edgellm(
    draft: Draft, outcomes: list[tuple[int, int]] | None = None, most_rows: int = 64, room: int = DEPTH + 1
) -> Cycle:
    return Cycle(draft, outcomes=outcomes or [], most_rows=most_rows, room=room).grow(navigate)


@pytest.mark.parametrize(("share", "n"), [(0.95, 1), (CONFIDENT, 1), (0.8, 3), (0.3, MOST_BRANCHES)])
def test_a_node_has_the_fewer_branches_the_surer_the_draft_is(share: float, n: int) -> None:
    """0.8 and 0.067 are not yet nine tenths; a third makes them so."""
    cycle = Cycle(sure(share))
    assert branches(cycle.situation) == list(range(n + 1))


def test_branches_go_down_to_where_their_product_falls_below_alpha() -> None:
    """0.6 to the power of nine is the first below a hundredth."""
    draft: Draft = lambda _path: [(0, 0.6)]  # noqa: E731  a table, in one line
    cycle = edgellm(draft)
    assert cycle.selected(likeliest_branches) == {(0,) * depth for depth in range(10)}
    assert 0.6**9 > FIRST_ALPHA > 0.6**10
    longer = edgellm(draft, [(9, 9)])
    shorter = edgellm(draft, [(9, 0)] * 3)
    assert len(longer.selected(likeliest_branches)) == 11
    assert len(shorter.selected(likeliest_branches)) == 5
    assert 0.6**10 > FIRST_ALPHA / 2 > 0.6**11
    assert 0.6**4 > 8 * FIRST_ALPHA > 0.6**5


@given(seed=st.integers(0, 10**6), wrong=st.lists(st.booleans(), max_size=6))
@settings(deadline=None, max_examples=40)
def test_edgellm_drafts_the_likeliest_branch_first_and_every_one_over_the_threshold(
    seed: int, wrong: list[bool]
) -> None:
    draft, outcomes = guesses(seed), [(2, 0 if failed else 2) for failed in wrong]
    cycle = edgellm(draft, outcomes, most_rows=500, room=6)
    least = alpha(outcomes)

    def below(path: Path, reach: float) -> Iterator[Path]:
        """A plain recursion over paths."""
        yield path
        total = 0.0
        for token, share in draft(path)[:MOST_BRANCHES]:
            if len(path) == 5 or reach * share < least or total >= CONFIDENT:
                return
            total += share
            yield from below((*path, token), reach * share)

    assert cycle.selected(likeliest_branches) == set(below((), 1.0))
    assert all(len(step) == 1 for step in cycle.steps)
    open_ = cycle.selected(likeliest_branches) - {(), *(cycle.path(node) for (node,) in cycle.steps)}
    assert all(len(path) == 5 for path in open_)


def test_edgellm_checks_the_likeliest_of_its_branches_where_a_pass_takes_no_more() -> None:
    cycle = edgellm(guesses(3), most_rows=6)
    all_reach = sorted((cycle.tree.reach[node] for node in branches(cycle.situation)), reverse=True)
    kept = likeliest_branches(cycle.situation)
    assert len(all_reach) > 6
    assert [cycle.tree.reach[node] for node in kept] == all_reach[:6]


def test_edgellm_navigates_from_the_likeliest_branch_and_not_before_the_first_pass() -> None:
    cycle = Cycle(sure(0.5))
    assert navigate(cycle.situation) == [1]
    cycle.tree.expand(1, 0, [(0, 0.1)])
    assert navigate(cycle.situation) == [2]  # 0.17 against 0.05
    assert navigate(Situation(cycle.tree, CycleCost(), 0.0, 8)) == []


def test_while_the_target_verifies_the_draft_goes_on_from_the_likeliest_leaf() -> None:
    cycle = edgellm(guesses(8))
    for _ in range(5):
        (node,) = go_on(cycle.situation)
        assert cycle.tree.reach[node] == max(cycle.tree.reach[leaf] for leaf in cycle.tree.frontier())
        cycle.tree.expand(node, 0, cycle.draft(cycle.path(node)))
    assert go_on(Situation(cycle.tree, cost(), 0.0, 8, room=1)) == []
