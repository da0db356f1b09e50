"""How many nodes a round verifies: as given, or what pays on this device with these drafts.

Trees of one proposal are nested: the best N nodes are the first N of any larger tree. So a chance
of being kept, node by node, says what every size would bring, and every round tells about all of
its nodes at once. What is verified decides how fast an answer comes and never what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from pspec.runtime.tree import Tree

KEEP = 0.95
"""Share of its weight that evidence keeps from one round to the next: the last twenty count."""
PRIOR_ROUNDS = 2.0
"""Rounds that the first guess weighs."""
PRIOR_CHANCE = 0.6
"""First guess for a model's drafts: each node's chance over that of the node before it."""
LOOK_AFTER = 8
"""Rounds at one size before a larger one may be tried again."""
LOOK_SHARE = 0.01
"""Share of the time that such looks may lose: the less promising, the rarer."""


class NodeBudget:
    """Decides round by round how much is drafted and verified; this one takes all there is."""

    def drafts(self, length: int) -> bool:
        """Whether to draft at all behind ``length`` cached rows."""
        return True

    def cut(self, tree: Tree, match: int, length: int) -> Tree:
        """The part of ``tree`` to verify; ``match`` is the proposal's."""
        return tree

    def observe(self, tree: Tree, path: Sequence[int], bonus: int) -> None:
        """``tree`` was verified: ``path`` was accepted, node 0 first, and ``bonus`` follows it."""


class Costs(Protocol):
    """Milliseconds of a round by tree size (see :class:`~pspec.runtime.round_cost.RoundCost`)."""

    @property
    def pays_for_drafts(self) -> bool:
        """Whether a proposal costs an engine call, so that a plain round goes without."""
        ...

    def at(self, length: int) -> list[float]:
        """For each tree size, behind ``length`` cached rows."""
        ...


class AutoNodes(NodeBudget):
    """The size with the most expected tokens a millisecond; a plain step where that wins.

    What it learns outlives a sequence. Deterministic: costs are the curve's, never the clock's.
    """

    def __init__(self, sizes: Sequence[int], costs: Costs) -> None:
        """Begin without evidence.

        Args:
            sizes: tree sizes the target has shapes for, ascending, 1 first.
            costs: of a round with each of them.
        """
        self._sizes = list(sizes)
        self._costs = costs
        self._seen: dict[int, Acceptance] = {}
        self._size = 1
        self._about: Acceptance | None = None
        self._whole: Tree | None = None
        self._offered: Tree | None = None

    def drafts(self, length: int) -> bool:
        self._offered = None
        if not self._costs.pays_for_drafts:
            return True  # what is proposed, and after how long a match, decides
        self._decide(0, length, self._sizes[-1])
        return self._size > 1

    def cut(self, tree: Tree, match: int, length: int) -> Tree:
        if not self._costs.pays_for_drafts:
            self._decide(match, length, len(tree))
        self._whole, self._offered = tree, tree.first(self._size)
        return self._offered

    def observe(self, tree: Tree, path: Sequence[int], bonus: int) -> None:
        if tree is not self._offered or self._whole is None or self._about is None:
            return  # no drafts, or no room for any
        whole = self._whole
        wanted = dict(zip(path, [*(tree.tokens[node] for node in path[1:]), bonus], strict=True))
        for node, parent in enumerate(whole.parents):
            if 0 <= parent < len(tree):  # verified, so its next token is known
                self._about.observe(node, wanted.get(parent) == whole.tokens[node])

    def _decide(self, match: int, length: int, available: int) -> None:
        kind = match.bit_length()  # a match of 12 tokens tells no more than one of 10
        if kind not in self._seen:
            chance = 1 - 0.5**kind if kind else PRIOR_CHANCE
            self._seen[kind] = Acceptance(self._sizes[-1], chance)
        self._about = self._seen[kind]
        sizes = [*(size for size in self._sizes if size < available), available]
        tokens, costs = self._about.expected_tokens(available), self._costs.at(length)
        # The last size is padded up to a shape, which is the one at its place in the list.
        rates = [tokens[size - 1] / costs[place] for place, size in enumerate(sizes)]
        self._size = sizes[self._about.place(rates, costs)]


class Acceptance:
    """How often each node of a best-first tree was kept: a mean over rounds that fades."""

    def __init__(self, nodes: int, chance: float) -> None:
        """Begin with a guess: node i is kept with probability ``chance`` ** i."""
        self._weight = [PRIOR_ROUNDS] * nodes
        self._kept = [PRIOR_ROUNDS * chance**node for node in range(nodes)]
        self._seen = [0] * nodes
        self._round = 0
        self._best, self._since = -1, 0

    def expected_tokens(self, nodes: int) -> list[float]:
        """Tokens of a round, the bonus included, by number of nodes from 1 to ``nodes``."""
        pairs = zip(self._kept[1:nodes], self._weight[1:nodes], strict=True)
        return list(accumulate((kept / weight for kept, weight in pairs), initial=1.0))

    def observe(self, node: int, kept: bool) -> None:
        """Whether a node was kept, or would have been, in this round.

        Evidence ages with the rounds, seen or not, but only fresh evidence moves an estimate: after
        a long time without, a single round says much.
        """
        fade = KEEP ** (self._round - self._seen[node])
        self._weight[node] = self._weight[node] * fade + 1
        self._kept[node] = self._kept[node] * fade + kept
        self._seen[node] = self._round

    def place(self, rates: Sequence[float], costs: Sequence[float]) -> int:
        """The place of the size to take in ``rates``: of the best, and now and then a larger one.

        Called once a round. Drafts may have become better meanwhile, and a small tree cannot tell.
        """
        self._round += 1
        best = max(range(len(rates)), key=rates.__getitem__)
        if best != self._best:
            self._best, self._since = best, self._round
        waited = self._round - self._since
        if waited < LOOK_AFTER:
            return best
        for place in range(len(rates) - 1, best, -1):
            # What it is expected to lose to the best, in rounds of it.
            loss = costs[place] / costs[best] * (1 - rates[place] / rates[best])
            if loss <= LOOK_SHARE * waited:
                self._since = self._round
                return place
        return best
