"""What is shown of a cycle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from lever.server.cycles import Cycles, State
from lever.trace import Cycle, Mark
from lever.tree import DraftTree, depth_first

ROOT = Path(__file__).parents[2]


def tree_of_five() -> DraftTree:
    """0 -> 1 -> 2, 0 -> 3, 1 -> 4; token 10 n at node n."""
    tree = DraftTree.rooted_at(0)
    tree.expand(0, 0, [(10, 0.5), (30, 0.25)])  # nodes 1 and 2
    tree.expand(1, 1, [(20, 0.5), (40, 0.5)])  # nodes 3 and 4
    return tree


def cycle(*marks: Mark, accepted: tuple[int, ...] = ()) -> Cycle:
    tree = tree_of_five()
    return Cycle(tree, depth_first(tree, [0, 1, 2, 3]), accepted, 2, 100.0, marks)


def shown_by(found: Cycle, read_bytes: int = 0) -> dict[str, object]:
    shown = Cycles(lambda token: f"t{token}", read_bytes).shown(found)
    return {name: getattr(shown, name) for name in shown.__struct_fields__}


def test_each_node_has_its_text_parent_and_reach() -> None:
    nodes = Cycles(lambda token: f"t{token}", 0).shown(cycle()).nodes

    assert [node.text for node in nodes] == ["t0", "t10", "t30", "t20", "t40"]
    assert [node.parent for node in nodes] == [-1, 0, 0, 1, 1]
    assert [node.reach for node in nodes] == [1.0, 0.5, 0.25, 0.25, 0.25]


def test_states_tell_what_became_of_a_node() -> None:
    # Depth-first the rows are nodes 0, 1, 3, 2: the second row, node 1, was accepted.
    nodes = Cycles(str, 0).shown(cycle(accepted=(1,))).nodes

    assert [node.state for node in nodes] == ["root", "accepted", "checked", "checked", "drafted"]


def test_what_was_pruned_is_neither_checked_nor_merely_guessed() -> None:
    tree = tree_of_five()
    went_on = depth_first(tree, [0, 1, 3])
    nodes = Cycles(str, 0).shown(Cycle(tree, went_on, (1,), 2, 100.0, (), pruned=(2,))).nodes

    assert [node.state for node in nodes] == ["root", "accepted", "pruned", "checked", "drafted"]


def test_the_page_and_its_manual_know_every_state_in_the_same_order() -> None:
    page = (ROOT / "src" / "lever" / "server" / "page.html").read_text()
    manual = " ".join((ROOT / "docs" / "serve.md").read_text().split())
    (shown,) = re.findall(r"const STATES = \{(.*)\};", page)

    assert ["root", *re.findall(r'(\w+): "', shown)] == list(get_args(State))
    assert f"`state`: {', '.join(get_args(State))})" in manual


def test_a_cycle_brings_a_token_more_than_it_accepts() -> None:
    assert [shown_by(cycle(accepted=accepted))["new_tokens"] for accepted in ((), (1,), (1, 2))] == [1, 2, 3]


def test_seconds_are_parted_by_what_was_done() -> None:
    shown = shown_by(
        cycle(
            Mark("draft", 100.0, 100.5, 0.0, 0),
            Mark("layer", 100.5, 101.5, 0.25, 700),
            Mark("layer", 101.5, 102.0, 0.5, 900),
            Mark("project", 102.0, 102.125, 0.0, 1000),
        ),
        read_bytes=400,
    )

    assert (
        shown.items()
        >= {
            "seconds": 2.125,
            "draft_s": 0.5,
            "compute_s": 0.75,
            "wait_s": 0.75,
            "project_s": 0.125,
            "read_bytes": 600,
        }.items()
    )


def test_what_is_read_counts_from_the_cycle_before() -> None:
    cycles = Cycles(str, 100)
    read = [cycles.shown(cycle(Mark("layer", 100, 101, 0.5, total))).read_bytes for total in (150, 150, 400)]

    assert read == [50, 0, 250]


def test_a_cycle_without_marks_took_no_time() -> None:
    shown = shown_by(cycle())

    assert (shown["seconds"], shown["draft_s"], shown["read_bytes"]) == (pytest.approx(0.0), 0.0, 0)
