"""What may follow the text, and whether asking pays: the draft, the text itself, or nothing. Runs no target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from lever.ahead import Ahead
from lever.cycle_cost import CycleCost
from lever.draft import Draft
from lever.lookup import Match, Record, find, tree_of
from lever.policies import Preset, Situation, most_worth, rate
from lever.pruner import Pruner, Thinned
from lever.request import Run
from lever.threads import ThreadChooser, relative
from lever.tree import DraftTree, TreeRows, depth_first, reroot
from lever.worth import Reliability, Worth


@dataclass(frozen=True, slots=True)
class Guess:
    """The tree of a cycle. `match`: what the text itself says may follow; `looked_up`: the tree is that, no draft's."""

    tree: DraftTree
    match: Match | None = None
    looked_up: bool = False


class Guesser:
    """Makes the tree of each cycle and learns from what became of it. Without a draft, and for a preset that does not
    draft, trees are their root.
    """

    def __init__(
        self,
        draft: Draft | None,
        policy: Preset,
        cost: CycleCost,
        most_rows: Callable[[], int],
        reading_threads: ThreadChooser,
        pruner: Pruner | None = None,
    ) -> None:
        """`most_rows` of a tree's pass as things are; the draft reads text with the threads of wide passes."""
        self._draft = draft if policy.drafts else None
        self._policy = policy
        self.cost = cost
        self._most_rows = most_rows
        self._reading_threads = reading_threads
        self._pruner = pruner if policy.prunes else None
        self._threads = ThreadChooser(*cost.draft_threads)
        self._ahead = None
        if self._draft is not None and policy.meanwhile is not None and (cost.has_room or not policy.adaptive):
            self._ahead = Ahead(self._draft, policy.meanwhile, cost, always=not policy.adaptive)
        self._worth, self._reliability, self._matches = Worth(), Reliability(), Record()

    # --- one cycle ------------------------------------------------------------------------------------------

    def guess(self, run: Run, tree: DraftTree) -> Guess:
        """The tree as the draft has grown it, or a chain from the text, where that promises more."""
        root = DraftTree.rooted_at(run.tokens[-1])
        self.cost.beside = False
        if not self._policy.drafts:
            return Guess(root)
        match = find(run.tokens) if self._policy.adaptive else None
        if self._policy.adaptive and self.cost.must_be_plain:
            return Guess(root, match)
        if match is not None:
            chain = tree_of(match, run.tokens[-1], self._matches.share(match.length))
            if self._promises_more(run, chain):
                return Guess(chain, match, looked_up=True)
        if self._draft is None or run.room < 2:
            return Guess(tree, match)
        if not self._is_worth_asking(run, self._draft):
            self._worth.wait()
            return Guess(root, match)
        if self._ahead is not None:
            self._ahead.begin()
        self._grow(run, tree, self._draft)
        return Guess(tree, match)

    def select(self, run: Run, guess: Guess) -> tuple[TreeRows, Thinned | None]:
        """The rows that are worth the target's pass, and how it is thinned, where it shall be.

        What the text itself says may follow has no other candidates beside it, so that scores say nothing of it.
        """
        now, tree = self._situation(run, guess.tree), guess.tree
        if self._ahead is not None and tree.expanded(0):
            nodes = self._ahead.choose(now, self._policy.select)
        else:
            nodes = self._policy.select(now)
        if self._pruner is None or guess.looked_up:
            return depth_first(tree, nodes), None
        nodes, thin = self._pruner.select(now, nodes, widen=self._policy.select is most_worth)
        rows = depth_first(tree, nodes)
        return rows, self._pruner.thinned(tree, rows, run.drafted_s) if thin else None

    def going_on(self, run: Run, guess: Guess, rows: TreeRows, thinned: Thinned | None) -> AbstractContextManager[None]:
        """Let the draft go on beside a pass over these rows, where that pays: what survives starts the next cycle."""
        if self._ahead is None or not self.cost.beside or not guess.tree.expanded(0):
            return nullcontext()
        pass_s = self.cost.pass_s(len(rows.nodes)) if thinned is None else thinned.expected_s
        return self._ahead.going_on(run, self._situation(run, guess.tree), self._reliability.value, pass_s)

    def layer_done(self, layer: int, n_layers: int) -> None:
        """The pass has done a layer."""
        if self._ahead is not None:
            self._ahead.layer_done((layer + 1) / n_layers)

    def judge(self, guess: Guess, node: int, token: int) -> None:
        """The target's token behind a node, against what the draft said."""
        tree = guess.tree
        if not guess.looked_up and tree.children[node] and tree.reach[node]:
            promised = sum(tree.reach[child] for child in tree.children[node].values()) / tree.reach[node]
            self._reliability.observe(promised / self._reliability.value, token in tree.children[node])

    def learn(self, run: Run, guess: Guess, n_rows: int) -> None:
        """What a cycle that checked so many rows tells of the next ones."""
        new = run.tokens[run.started :]
        run.outcomes.append((n_rows - 1, len(new) - 1))
        run.stats.looked_up += guess.looked_up
        if guess.match is not None:
            self._matches.observe(guess.match, new)
        if not guess.looked_up and run.drafted_s and not run.trial:
            plain_s = self.cost.alone_s(1) + self.cost.project_s()
            self._worth.observe(len(new), run.drafted_s + run.cycle_s, plain_s)

    def rerooted(self, run: Run, guess: Guess, accepted: Sequence[int]) -> DraftTree:
        """The tree of the next cycle: what lives on behind these nodes and the text's last token, or that alone."""
        token, tree = run.tokens[-1], guess.tree
        if self._draft is None or guess.looked_up or not tree.expanded(0):
            return DraftTree.rooted_at(token)
        if self._ahead is not None:
            self._ahead.learn(tree, accepted, token, self._worth.tokens_per_s)
        found = reroot(tree, accepted, token, carry_over=self._policy.carry_over)
        self._draft.follow(found, [*(tree.tokens[node] for node in accepted), token])
        return found.tree

    # --- the draft ------------------------------------------------------------------------------------------

    def read(self, run: Run) -> None:
        """Have the draft read the prompt, before the first cycle needs it."""
        draft = self._draft
        if draft is None or len(run.tokens) >= draft.model.shape.n_ctx or not self._is_worth_asking(run, draft):
            return
        started, behind = time.perf_counter(), draft.behind(run.tokens)
        draft.model.n_threads = self._reading_threads.count
        draft.read(run.tokens, run.stop_if_cancelled)
        seconds = time.perf_counter() - started
        if behind > draft.model.shape.n_logits:
            self.cost.observe_reading(behind, seconds)
        run.stats.prefill_s += seconds

    def _is_worth_asking(self, run: Run, draft: Draft) -> bool:
        """Whether it has paid so far, or is worth another try: for which the draft has to read what it missed."""
        if not self._policy.adaptive:
            return True
        passes = self.cost.reading_s(draft.behind(run.tokens)) / (self.cost.pass_s(1) or 1.0)
        return self._worth.guessing and self._worth.can_afford(passes, hopeful=self.cost.waits_for_reads)

    def _grow(self, run: Run, tree: DraftTree, draft: Draft) -> None:
        """Draft while the policy says that it pays."""
        if len(run.tokens) > draft.model.shape.n_ctx:
            return
        started, trust = time.perf_counter(), self._reliability.value
        self._begin(run, tree, draft, trust)
        while True:
            run.drafted_s = time.perf_counter() - started
            nodes = self._policy.grow(self._situation(run, tree))[: draft.room]
            if not nodes:
                break
            before, trial = run.trace.lap(), self._threads.trying
            draft.model.n_threads = self._threads.count
            draft.expand(tree, nodes, run.temperature, trust)
            seconds = run.trace.mark("draft", before) - before
            self._threads.observe(relative(seconds, self.cost.draft_s(len(nodes))), 0.0)
            run.trial |= trial
            if not trial:
                self.cost.observe_draft(len(nodes), seconds)
            run.stats.drafted += len(nodes)
            run.trace.drafted += len(nodes)
            run.stop_if_cancelled()
        run.stats.draft_s += run.drafted_s

    def _begin(self, run: Run, tree: DraftTree, draft: Draft, trust: float) -> None:
        """Have the draft read what it did not say itself, and expand the root."""
        started, behind = time.perf_counter(), draft.behind(run.tokens)
        reads = behind > draft.model.shape.n_logits
        draft.model.n_threads = (self._reading_threads if reads else self._threads).count
        draft.begin(tree, run.tokens, run.temperature, trust)
        if reads:  # all but the root, which is a step like others
            seconds = time.perf_counter() - started - self.cost.draft_s(1)
            self.cost.observe_reading(behind - 1, max(seconds, 0.0))

    # --- the text -------------------------------------------------------------------------------------------

    def _promises_more(self, run: Run, chain: DraftTree) -> bool:
        """Whether a chain from the text brings more tokens a second than what would be done without it."""
        now, cost = self._situation(run, chain), self.cost
        if not cost.knows_passes:
            return False
        nodes = most_worth(now)
        if len(nodes) == 1:
            return False
        promised = rate(now, nodes)
        if self._draft is None or not self._worth.guessing:
            return promised > rate(now, [0])
        drafted = self._worth.tokens_per_s
        if drafted is None:
            return False
        return 1 / (1 / promised + cost.reading_s()) > drafted  # the draft will have to read what it did not say

    def _situation(self, run: Run, tree: DraftTree) -> Situation:
        return Situation(tree, self.cost, run.drafted_s, self._most_rows(), run.room, run.outcomes)
