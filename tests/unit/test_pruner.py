"""Whether pruning pays, which rows begin a pass and which go on, by scores and costs that are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from lever.cycle_cost import CycleCost, Foretold
from lever.model import Model
from lever.policies import Situation, most_worth
from lever.predictor import Quality, Translator
from lever.prune import PAPER, Candidate, Mix, candidates, over_threshold, weigh
from lever.pruner import FIRST_TOKENS, FORGOTTEN_CYCLES, PAYS, Pruner, Pruning, Rule, expected_gain, paper_rule
from lever.scores import Scores
from lever.tree import IN_TEXT, DraftTree, TreeRows, depth_first
from tests.fakes import FakeClock

N_LAYERS, LAYER = 10, 1  # pruned behind the second of ten: a fifth of them is for all rows
BASE_S, ROW_S, PROJECT_S = 0.2, 0.01, 0.001
UNLIKELY, TRUE = range(2, 19), 9  # tokens, and the one of them that comes


def translator(layer: int = LAYER, kept_rows: float = 0.2, threshold: float = 0.2) -> Translator:
    quality = Quality(kept_rows=kept_rows)
    return Translator(layer=layer, mix=Mix(1.0, 1.0), threshold=threshold, quality=quality)


def cost(*, read_s: float = 0.0) -> CycleCost:
    """A machine on which a pass computes for 0.2 s, and 0.01 s more for each row."""
    compute = {1: {rows: BASE_S + ROW_S * rows for rows in (1, 128)}}
    return CycleCost(1, Foretold(compute=compute, read_s=read_s, rest_s=0.0, project={1: PROJECT_S}, draft={}))


def tree() -> DraftTree:
    """One likely candidate, and seventeen of which none is worth a row through all layers."""
    found = DraftTree.rooted_at(0)
    found.expand(0, IN_TEXT, [(1, 0.3), *((token, 0.035) for token in UNLIKELY)])
    return found


Say = Callable[[int], float]  # token -> score


def nothing(_token: int) -> float:
    """Of a predictor that knows no more than the draft."""
    return 0.0


def sure_of_one(token: int) -> float:
    """Of one that has seen which of the unlikely ones it is."""
    return 20.0 if token == TRUE else 0.0


class Scoring:
    """In the place of a Model: scores candidates as it is told to."""

    def __init__(self, say: Say = nothing, score_s: float = 0.0, clock: FakeClock | None = None) -> None:
        self.config = SimpleNamespace(n_layers=N_LAYERS)
        self.stats = SimpleNamespace(layers_s=0.0)
        self.say = say
        self.asked: list[tuple[int, list[tuple[int, int]]]] = []
        self._score_s, self._clock = score_s, clock or FakeClock()

    def score(self, _scores: Scores, n_rows: int, pairs: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
        self.asked.append((n_rows, list(pairs)))
        self._clock.took(self._score_s)
        return np.array([self.say(token) for _, token in pairs], np.float32)

    def as_model(self) -> Model:
        return cast(Model, self)


SCORES = cast(Scores, None)  # of a model that needs none


class Cycles:
    """Cycles one after another over the same tree, as the engine has them; which of them were thinned."""

    def __init__(self, pruner: Pruner, known: CycleCost) -> None:
        self.pruner, self.tree = pruner, tree()
        self.now = Situation(self.tree, known, 0.0, 48)
        self.nodes = most_worth(self.now)

    def thinned(self, n: int) -> list[bool]:
        found = []
        for _ in range(n):
            nodes, thin = self.pruner.select(self.now, self.nodes, widen=True)
            if thin:
                self.pruner.survivors(self.tree, depth_first(self.tree, nodes), 0.0)
            found.append(thin)
        return found


def cycles(
    say: Say = nothing, *, read_s: float = 0.0, of: Translator | None = None, rule: Rule | None = None
) -> Cycles:
    known = cost(read_s=read_s)
    return Cycles(Pruner(Scoring(say).as_model(), SCORES, of or translator(), known, rule), known)


# --- what begins a pass -------------------------------------------------------------------------------------


def test_where_compute_is_the_limit_more_rows_begin_a_pass_that_will_be_thinned() -> None:
    found = cycles()
    assert found.nodes == [0, 1]
    nodes, thin = found.pruner.select(found.now, found.nodes, widen=True)
    assert thin
    assert nodes == list(range(len(nodes)))
    assert len(nodes) > 12


def test_under_the_knee_rows_are_free_and_the_pass_is_left_alone() -> None:
    found = cycles(read_s=1.0)
    assert len(found.nodes) == 19
    assert found.pruner.select(found.now, found.nodes, widen=True) == (found.nodes, False)


@pytest.mark.parametrize(
    "of",
    [translator(kept_rows=1.0), translator(layer=N_LAYERS - 2)],
    ids=["a predictor that drops nothing", "behind nearly all layers"],
)
def test_a_pass_is_left_alone_where_thinning_saves_nothing(of: Translator) -> None:
    found = cycles(of=of)
    assert found.pruner.select(found.now, found.nodes, widen=True) == (found.nodes, False)


def test_a_pass_is_left_alone_where_thinning_saves_hardly_anything() -> None:
    """All tokens are kept by now, and time is saved; but drafting takes a hundred times as long as the pass."""
    found = cycles(sure_of_one)
    assert all(found.thinned(100))
    slow = replace(found.now, spent_s=100.0)
    nodes = most_worth(slow)
    assert found.pruner.select(slow, nodes, widen=True) == (nodes, False)


def test_no_more_rows_begin_a_pass_than_it_takes() -> None:
    found = cycles()
    narrow = Situation(found.tree, cost(), 0.0, 12)
    assert found.pruner.select(narrow, found.nodes, widen=True) == (list(range(12)), True)


def test_a_rule_is_asked_in_every_pass_over_what_was_chosen_without_it() -> None:
    for read_s in (0.0, 1.0):
        found = cycles(read_s=read_s, rule=lambda *_: [0])
        assert found.pruner.select(found.now, found.nodes, widen=True) == (found.nodes, True)


@pytest.mark.parametrize("rule", [None, lambda *_: [0]], ids=["as many as pay", "a rule"])
def test_a_plain_pass_and_the_first_of_all_are_not_thinned(rule: Rule | None) -> None:
    found = cycles(rule=rule)
    assert found.pruner.select(found.now, [0], widen=False) == ([0], False)
    unknown = CycleCost()
    first = Pruner(Scoring().as_model(), SCORES, translator(), unknown, rule)
    assert first.select(Situation(found.tree, unknown, 0.0, 48), [0, 1], widen=True) == ([0, 1], False)


# --- what goes on -------------------------------------------------------------------------------------------


def test_all_candidates_behind_rows_with_a_child_are_scored_those_that_are_no_rows_too() -> None:
    model, known = Scoring(), cost()
    pruner = Pruner(model.as_model(), SCORES, translator(), known)
    grown = tree()
    grown.expand(1, 0, [(7, 0.6), (8, 0.2)])  # behind the likely one; node 19 and 20
    rows = depth_first(grown, [0, 1, 2, 19])

    pruner.survivors(grown, rows, 0.0)
    assert model.asked == [(4, [*((0, token) for token in range(1, 19)), (1, 7), (1, 8)])]


def test_the_rows_go_on_that_bring_the_most_tokens_a_second_by_what_the_scores_say() -> None:
    rows = depth_first(tree(), range(19))
    for say, kept in ((nothing, [0, 1]), (sure_of_one, [0, TRUE])):
        assert list(cycles(say).pruner.survivors(tree(), rows, 0.0)) == kept


def test_what_was_spent_on_drafting_is_made_good_by_more_rows() -> None:
    rows, pruner = depth_first(tree(), range(19)), cycles().pruner
    few, many = (len(pruner.survivors(tree(), rows, spent_s)) for spent_s in (0.0, 2.0))
    assert few < many == 19


def test_the_papers_rule_has_edges_by_the_predictor_alone_against_the_threshold() -> None:
    grown, rows = tree(), depth_first(tree(), range(19))
    found = candidates(grown, rows)
    scores = [float(candidate.node % 5) for candidate in found]
    for threshold in (0.0, 0.02, 0.1, 0.9):
        expected = over_threshold(rows, weigh(grown, rows, found, scores, PAPER).edge, threshold)
        assert paper_rule(translator(threshold=threshold))(grown, rows, found, scores) == expected


def test_a_rule_gets_the_scores_and_decides() -> None:
    given: list[tuple[DraftTree, TreeRows, Sequence[Candidate], Sequence[float]]] = []

    def rule(of: DraftTree, rows: TreeRows, found: Sequence[Candidate], scores: Sequence[float]) -> Sequence[int]:
        given.append((of, rows, found, scores))
        return [0, 5]

    grown, rows = tree(), depth_first(tree(), range(19))
    assert cycles(sure_of_one, rule=rule).pruner.survivors(grown, rows, 0.0) == [0, 5]
    assert given == [(grown, rows, candidates(grown, rows), [sure_of_one(token) for token in range(1, 19)])]


@pytest.mark.parametrize("rule", [None, lambda *_: [0]], ids=["as many as pay", "a rule"])
@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_where_a_score_is_no_number_all_rows_go_on(rule: Rule | None, score: float) -> None:
    """Something overflowed: that is seen to at the end of the pass, if it is still there."""
    rows = depth_first(tree(), range(19))
    pruner = cycles(lambda token: score if token == 9 else 0.0, rule=rule).pruner
    assert list(pruner.survivors(tree(), rows, 0.0)) == list(range(19))


# --- what cycles show ---------------------------------------------------------------------------------------


def test_a_predictor_that_knows_no_more_than_the_draft_is_found_out() -> None:
    thinned = cycles(nothing).thinned(40)
    assert thinned[0]
    assert not any(thinned[20:])


def test_one_that_knows_more_is_asked_on() -> None:
    assert all(cycles(sure_of_one).thinned(100))


def test_one_that_drops_less_than_was_thought_is_found_out() -> None:
    """All rows were worth their layers each time: there is nothing to be saved."""
    found = cycles()
    found.pruner.survivors(found.tree, depth_first(found.tree, range(19)), 2.0)
    assert found.pruner.select(found.now, found.nodes, widen=True)[1]
    for _ in range(30):
        found.pruner.survivors(found.tree, depth_first(found.tree, range(19)), 2.0)
    assert found.pruner.select(found.now, found.nodes, widen=True) == (found.nodes, False)


def test_scores_that_are_no_numbers_show_nothing() -> None:
    found = cycles(lambda _token: float("nan"))
    assert all(found.thinned(100))


def test_after_cycles_enough_without_it_what_pruning_showed_is_unknown_again() -> None:
    found = cycles(nothing)
    began = found.thinned(40).index(False)
    again = found.thinned(FORGOTTEN_CYCLES + 1 - (40 - began))
    assert again == [*[False] * (len(again) - 1), True]
    assert found.thinned(40).index(False) == began - 1  # as at first


def test_each_cycle_with_it_begins_the_count_anew() -> None:
    found = cycles(sure_of_one)
    found.thinned(10)
    shown, slow = found.pruner._rows, replace(found.now, spent_s=100.0)  # a cycle of which the pass is next to nothing
    for _ in range(3):
        for _ in range(FORGOTTEN_CYCLES - 1):
            assert not found.pruner.select(slow, most_worth(slow), widen=True)[1]
        assert found.pruner.select(found.now, found.nodes, widen=True)[1]
    assert found.pruner._rows == shown


def test_scores_that_take_longer_than_they_save_are_left() -> None:
    found = cycles(sure_of_one)
    found.pruner.took(0.01)
    assert found.thinned(3) == [True] * 3
    found.pruner.took(1.0)  # a tenth of it counts
    assert found.thinned(3) == [False] * 3


def test_the_first_scores_count_as_they_were() -> None:
    found = cycles(sure_of_one)
    found.pruner.took(0.15)
    assert found.thinned(1) == [False]


def test_scores_that_took_long_once_are_tried_again() -> None:
    """It may have been somebody else's fault, and nothing else would ever correct the figure."""
    found = cycles(sure_of_one)
    found.pruner.took(60.0)
    assert found.thinned(FORGOTTEN_CYCLES + 1) == [*[False] * FORGOTTEN_CYCLES, True]


def test_pruners_of_one_predictor_learn_for_themselves() -> None:
    known, pruning = cost(), Pruning(SCORES, translator())
    one, other = (Cycles(pruning.pruner(Scoring().as_model(), known), known) for _ in range(2))
    assert not one.thinned(40)[-1]
    assert other.thinned(1) == [True]


# --- one pass -----------------------------------------------------------------------------------------------


def test_a_pass_that_was_thinned_tells_what_all_layers_would_have_taken_for_either_number_of_rows() -> None:
    model, grown = Scoring(sure_of_one), tree()
    pruner = Pruner(model.as_model(), SCORES, translator(), cost())
    model.stats.layers_s = 7.0  # of passes before
    thinned = pruner.thinned(grown, depth_first(grown, range(19)), 0.0)
    assert thinned.thinning.layer == LAYER

    model.stats.layers_s += 0.08  # a fifth of the layers
    assert thinned.thinning.choose() == thinned.kept == [0, TRUE]
    assert thinned.whole(compute_s=0.24) == pytest.approx({19: 0.08 / 0.2, 2: 0.16 / 0.8})
    assert thinned.pruned == [node for node in range(1, 19) if node != TRUE]


def test_what_a_thinned_pass_tells_makes_the_next_one_foretold_as_it_was() -> None:
    model, grown, known = Scoring(), tree(), CycleCost()
    pruner = Pruner(model.as_model(), SCORES, translator(), known, lambda *_: [0, 1, 2, 3])
    thinned = pruner.thinned(grown, depth_first(grown, range(19)), 0.0)
    model.stats.layers_s += 0.08
    thinned.thinning.choose()
    known.observe_pass(19, 0.24, 0.24, 0.0, whole=thinned.whole(0.24))
    assert known.thinned_s(19, 4, pruner.share) == pytest.approx(0.24)


def test_a_pass_of_which_all_rows_went_on_is_a_whole_one() -> None:
    model, grown = Scoring(lambda _token: float("nan")), tree()
    thinned = Pruner(model.as_model(), SCORES, translator(), cost()).thinned(grown, depth_first(grown, range(19)), 0.0)
    model.stats.layers_s += 0.08
    thinned.thinning.choose()
    assert (thinned.whole(compute_s=0.4), thinned.pruned) == ({19: 0.4}, [])


def test_nodes_that_were_pruned_are_named_as_the_tree_names_them() -> None:
    grown = tree()
    grown.expand(18, 0, [(7, 0.6)])  # node 19, behind the last of the root's
    rows = depth_first(grown, [0, 1, 18, 19])
    pruner = Pruner(Scoring().as_model(), SCORES, translator(), cost(), lambda *_: [0, 2])
    thinned = pruner.thinned(grown, rows, 0.0)
    thinned.thinning.choose()
    assert thinned.pruned == [1, 19]


def test_scores_and_their_weighing_are_timed_and_count_from_then_on() -> None:
    clock, known = FakeClock(), cost()
    pruner = Pruner(Scoring(sure_of_one, score_s=0.5, clock=clock).as_model(), SCORES, translator(), known)
    found = Cycles(pruner, known)
    assert found.pruner.select(found.now, found.nodes, widen=True)[1]
    thinned = pruner.thinned(found.tree, depth_first(found.tree, range(19)), 0.0)
    assert thinned.score_s == 0.0
    with mock.patch("lever.pruner.time", SimpleNamespace(perf_counter=lambda: clock.now)):
        thinned.thinning.choose()
    assert thinned.score_s == 0.5
    assert not found.pruner.select(found.now, found.nodes, widen=True)[1]  # half a second is more than a whole pass


# --- what is expected ---------------------------------------------------------------------------------------


def test_what_pruning_is_expected_to_bring_is_fewer_tokens_in_less_time() -> None:
    whole_s = BASE_S + 48 * ROW_S + 5 * PROJECT_S
    thinned_s = BASE_S + (0.2 * 48 + 0.8 * 10) * ROW_S + FIRST_TOKENS * 5 * PROJECT_S

    found = expected_gain(cost(), translator(), N_LAYERS, spent_s=0.1, rows=48, tokens=5.0)
    assert found == pytest.approx(FIRST_TOKENS * (0.1 + whole_s) / (0.1 + thinned_s))
    assert found > PAYS


def test_under_the_knee_it_is_expected_to_lose_what_it_drops() -> None:
    found = expected_gain(cost(read_s=2.0), translator(), N_LAYERS, spent_s=0.1, rows=48, tokens=5.0)
    assert found == pytest.approx(FIRST_TOKENS, rel=0.01)


def test_the_more_layers_are_spared_and_the_more_rows_the_more_is_expected() -> None:
    def gains(of: Sequence[Translator]) -> list[float]:
        return [expected_gain(cost(), each, N_LAYERS, 0.1, 48, 5.0) for each in of]

    by_layer = gains([translator(layer=layer) for layer in range(N_LAYERS - 1)])
    by_rows = gains([translator(kept_rows=kept) for kept in (0.1, 0.4, 0.7, 1.0)])
    for found in (by_layer, by_rows):
        assert found == sorted(found, reverse=True)
        assert found[0] > PAYS
    assert by_rows[-1] < 1
