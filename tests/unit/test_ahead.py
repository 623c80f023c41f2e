"""Whether the draft goes on beside a pass, and what it does there, by costs that are written down."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest

from lever.ahead import FORGOTTEN_CYCLES, PASSES_WITHOUT_A_STEP, Ahead
from lever.cycle_cost import CycleCost, Foretold
from lever.draft import Draft
from lever.engine import _threads_beside
from lever.model import Model
from lever.policies import Situation, ahead, most_worth
from lever.request import Run
from lever.stats import RunStats
from lever.tree import IN_TEXT, DraftTree
from tests.fakes import wait_until

STEP_S, ROW_S = 0.02, 0.01
GUESSES = [(1, 0.6), (2, 0.3)]  # behind every node


def machine(*, read_s: float, n_threads: int = 2, step_s: float = STEP_S) -> CycleCost:
    """Rows take 10 ms each on one thread and half of it on two."""
    compute = {n: {1: ROW_S / n, 64: 64 * ROW_S / n} for n in (1, 2)}
    draft = {n: {1: step_s, 8: step_s} for n in (1, 2)}
    return CycleCost(n_threads, Foretold(compute=compute, read_s=read_s, rest_s=0.0, project={1: 0.001}, draft=draft))


def grown(n_steps: int = 6) -> DraftTree:
    """The likeliest nodes are expanded."""
    tree = DraftTree.rooted_at(0)
    tree.expand(0, IN_TEXT, GUESSES)
    for slot in range(n_steps):
        tree.expand(tree.frontier()[0], slot, GUESSES)
    return tree


@dataclass
class Drafting:
    """In the place of a Draft: a step waits for `gate`."""

    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(n_threads=0))
    room: int = 48
    gate: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    most: int = 1000  # steps that its cache has room for
    asked: list[Sequence[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def expand(self, tree: DraftTree, nodes: Sequence[int], _temperature: float, _trust: float) -> None:
        self.asked.append(list(nodes))
        self.room = self.room if len(self.asked) < self.most else 0
        self.gate.wait(10)
        if self.fails:
            raise ValueError("the draft failed")
        for node in nodes:
            tree.expand(node, len(self.asked), GUESSES)


@dataclass
class Beside:
    """A policy's drafting beside passes of one machine."""

    cost: CycleCost
    always: bool = False
    tree: DraftTree = field(default_factory=grown)
    draft: Drafting = field(default_factory=Drafting)
    run: Run = field(default_factory=lambda: cast(Run, SimpleNamespace(temperature=0.0, stats=RunStats())))

    def __post_init__(self) -> None:
        self.ahead = Ahead(cast(Draft, self.draft), ahead, self.cost, always=self.always)

    @property
    def now(self) -> Situation:
        return Situation(self.tree, self.cost, 0.1, 48)

    def decided(self) -> bool:
        """Of one cycle."""
        self.ahead.begin()
        self.checked = self.ahead.choose(self.now, most_worth)
        return self.cost.beside

    def during(self, n_steps: int) -> None:
        """A pass that lasts until so many steps were made beside it."""
        enough = len(self.draft.asked) + n_steps
        with self.ahead.going_on(self.run, self.now, 1.0, self.cost.pass_s(8)):
            wait_until(lambda: len(self.draft.asked) >= enough)

    def drew(self, accepted: Sequence[int], token: int, tokens_per_s: float | None = None) -> None:
        self.ahead.learn(self.tree, accepted, token, tokens_per_s)


# --- whether ------------------------------------------------------------------------------------------------


def test_where_passes_wait_for_reads_the_draft_goes_on() -> None:
    assert Beside(machine(read_s=1.0)).decided()


def test_where_compute_is_the_limit_the_pass_keeps_its_cores() -> None:
    assert not Beside(machine(read_s=0.0)).decided()


def test_one_that_nobody_asks_goes_on_everywhere() -> None:
    assert Beside(machine(read_s=0.0), always=True).decided()


def test_it_is_left_where_nothing_of_it_survives_and_tried_again_much_later() -> None:
    found = Beside(machine(read_s=1.0))
    for _ in range(12):
        if not found.decided():
            break
        found.drew([], 9)  # a token that the draft did not name
    assert [found.decided() for _ in range(FORGOTTEN_CYCLES + 1)].index(True) > FORGOTTEN_CYCLES // 2


def test_it_is_kept_up_where_it_saves_steps_although_passes_take_a_little_longer() -> None:
    found = Beside(machine(read_s=0.2), tree=grown(1))
    for _ in range(12):
        found.tree = grown(1)
        assert found.decided()
        found.during(4)
        found.drew([], 1)


def test_nothing_is_decided_before_anything_is_known_of_passes() -> None:
    assert not Beside(CycleCost(2)).decided()


def test_passes_with_it_are_known_apart_from_those_without() -> None:
    cost = machine(read_s=0.1)
    before = cost.pass_s(8)
    cost.beside = True
    for _ in range(4):
        cost.observe_pass(8, 0.2, 0.2, 0.1, threads=1)
    assert cost.pass_s(8) == pytest.approx(0.2, rel=0.05)
    assert cost.alone_s(8) == before
    cost.beside = False
    assert cost.pass_s(8) == before


def test_a_pass_with_it_leaves_the_draft_a_core() -> None:
    cost = machine(read_s=0.0)
    assert cost.threads(48) == 2
    cost.beside = True
    assert cost.threads(48) == 1


@pytest.mark.parametrize(
    ("target", "draft", "threads"),
    [("cpu", "cpu", 1), ("cpu", "rpc:x:1", 2), ("rpc:x:1", "cpu", 2), ("rpc:x:1", "rpc:x:1", 0)],
)
def test_a_draft_on_a_device_of_its_own_takes_no_core_and_one_on_the_same_has_no_room(
    target: str, draft: str, threads: int
) -> None:
    model, its_draft = SimpleNamespace(device=target), SimpleNamespace(model=SimpleNamespace(device=draft))
    assert _threads_beside(cast(Model, model), cast(Draft, its_draft), 2) == threads
    cost = CycleCost(2, threads_beside=threads)
    assert cost.has_room == (threads > 0)


def test_a_draft_on_a_device_of_its_own_makes_its_steps_as_it_always_does() -> None:
    assert machine(read_s=0.0).hidden_threads == 1
    foretold = Foretold(compute={}, read_s=0.0, rest_s=0.0, project={}, draft={1: {1: 0.1}, 2: {1: 0.05}})
    assert CycleCost(2, foretold, threads_beside=2).hidden_threads == 2


# --- what is saved ------------------------------------------------------------------------------------------


def test_what_survives_saves_a_step_for_each_level_of_it() -> None:
    found = Beside(machine(read_s=1.0), tree=grown(0))
    found.decided()
    found.during(4)
    below = [node for nodes in found.draft.asked for node in nodes if 1 in (node, *found.tree.path(node))]
    levels = {found.tree.depths[node] for node in below}
    assert len(levels) > 1
    found.drew([], 1)
    assert found.ahead._saved.value == pytest.approx(len(levels) * STEP_S)


def test_a_step_saves_no_more_time_than_what_it_brings_is_worth() -> None:
    found = Beside(machine(read_s=1.0), tree=grown(0))
    found.decided()
    found.during(1)
    found.drew([], 1, tokens_per_s=1e6)
    assert found.ahead._saved.value == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("token", [2, 9])
def test_what_was_drafted_below_another_token_saves_nothing(token: int) -> None:
    found = Beside(machine(read_s=1.0), tree=grown(0))
    found.decided()
    found.draft.room, found.draft.most = 1, 1
    found.during(1)
    assert found.draft.asked == [[1]]
    found.drew([], token)
    assert found.ahead._saved.value == 0.0


def test_a_cycle_without_it_says_nothing_of_it() -> None:
    found = Beside(machine(read_s=0.0))
    assert not found.decided()
    found.drew([], 1)
    assert found.ahead._saved.value is None


# --- beside a pass ------------------------------------------------------------------------------------------


def test_the_draft_grows_the_tree_while_the_pass_lasts_and_not_longer() -> None:
    found = Beside(machine(read_s=1.0), tree=grown(0))
    found.decided()
    found.during(3)
    assert not drafting()
    assert len(found.draft.asked) >= 3
    assert found.run.stats.drafted == sum(map(len, found.draft.asked))
    assert found.run.stats.draft_hidden_s > 0
    assert found.draft.model.n_threads == 1


def drafting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("lever-draft")]


@pytest.mark.parametrize(("done", "n_steps"), [(0.3, 1), (0.5, 0)])
def test_no_step_is_begun_that_the_pass_would_have_to_wait_for(done: float, n_steps: int) -> None:
    """A step takes 60 ms and the pass 100. The first one is over in no time, of which a second one hears nothing."""
    found = Beside(machine(read_s=0.1, step_s=0.06), tree=grown(0))
    found.decided()
    found.draft.most = 1
    first = found.ahead._nodes

    def once_the_layer_is_done(now: Situation) -> list[int]:
        found.ahead.layer_done(done)
        return first(now)

    with mock.patch.object(found.ahead, "_nodes", once_the_layer_is_done):
        with found.ahead.going_on(found.run, found.now, 1.0, 0.1):
            wait_until(lambda: found.run.stats.draft_hidden_s > 0)  # the thread has come to its end by itself
        assert len(found.draft.asked) == n_steps


def test_steps_that_seemed_too_long_for_any_pass_are_tried_again() -> None:
    found = Beside(machine(read_s=0.05), always=True, tree=grown(0))
    for _ in range(4):
        found.cost.observe_hidden(1, 1.0)
    assert found.cost.hidden_s(1) > 0.05
    for _ in range(PASSES_WITHOUT_A_STEP + 1):
        found.ahead.begin()
        with found.ahead.going_on(found.run, found.now, 1.0, 0.05):
            wait_until(lambda: not found.ahead._nodes(found.now) or found.run.stats.draft_hidden_s > 0)
        found.run.stats.draft_hidden_s = 0.0
    assert found.draft.asked


def test_one_slow_pass_with_it_is_not_held_against_it_for_ever() -> None:
    found = Beside(machine(read_s=1.0))
    assert found.decided()
    for _ in range(4):
        found.cost.observe_pass(8, 3.0, 3.0, 1.0, threads=1)
    decided = [found.decided() for _ in range(FORGOTTEN_CYCLES + 1)]
    assert not any(decided[: FORGOTTEN_CYCLES // 2])
    assert decided[-1]


def test_a_pass_keeps_its_cores_where_the_draft_has_nothing_to_do() -> None:
    found = Beside(machine(read_s=1.0))
    found.draft.room = 0
    assert not found.decided()


def test_a_draft_that_fails_beside_a_pass_is_the_error() -> None:
    found = Beside(machine(read_s=1.0))
    found.decided()
    found.draft.fails = True
    with pytest.raises(ValueError, match="the draft failed"):
        found.during(1)


def test_a_pass_that_fails_is_the_error_and_ends_the_drafting() -> None:
    found = Beside(machine(read_s=1.0))
    found.decided()
    with pytest.raises(ZeroDivisionError), found.ahead.going_on(found.run, found.now, 1.0, 1.0):
        raise ZeroDivisionError
    assert not drafting()


def test_the_likeliest_nodes_are_asked_first_and_hopeless_ones_never() -> None:
    tree = DraftTree.rooted_at(0)
    tree.expand(0, IN_TEXT, [(1, 0.005), (2, 0.6), (3, 0.3)])
    assert ahead(Situation(tree, machine(read_s=1.0), 0.0, 48)) == [2, 3]  # a step takes as long for both
    hopeless = DraftTree.rooted_at(0)
    hopeless.expand(0, IN_TEXT, [(1, 0.005)])
    assert ahead(Situation(hopeless, machine(read_s=1.0), 0.0, 48)) == []
