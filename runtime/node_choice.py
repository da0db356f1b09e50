"""How many nodes a round verifies: as given, or what pays on this device with these drafts.

Trees of one proposal are nested: the best N nodes are the first N of any larger tree. So a chance
of being kept, node by node, says what every size would bring, and every round tells about all of
its nodes at once. What is verified decides how fast an answer comes and never what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
        whole, count = self._whole, len(tree)
        # A call tells of every node whose parent it held: the parent's next token is known.
        known = np.asarray(whole.parents[1:], np.int32) < count
        kept = np.zeros(len(whole) - 1, np.bool_)
        kept[np.asarray(path[1:], np.int32) - 1] = True
        for node in range(count, len(whole)):
            if whole.parents[node] == path[-1] and whole.tokens[node] == bonus:
                kept[node - 1] = True
        self._about.observe(known, kept)

    def _decide(self, match: int, length: int, available: int) -> None:
        kind = match.bit_length()  # a match of 12 tokens tells no more than one of 10
        if kind not in self._seen:
            chance = 1 - 0.5**kind if kind else PRIOR_CHANCE
            self._seen[kind] = Acceptance(self._sizes[-1], chance)
        self._about = self._seen[kind]
        sizes = [*(size for size in self._sizes if size < available), available]
        # The last size is padded up to a shape, which is the one at its place in the list.
        costs = np.asarray(self._costs.at(length)[: len(sizes)])
        tokens = self._about.expected_tokens()[np.asarray(sizes) - 1]
        best = int(np.argmax(tokens / costs))
        losses = costs / costs[best] - tokens / tokens[best]
        self._size = sizes[self._about.look_up(best, losses)]


class Acceptance:
    """How often each node of a best-first tree was kept: a mean over rounds that fades."""

    def __init__(self, nodes: int, chance: float) -> None:
        """Begin with a guess: node i is kept with probability ``chance`` ** i."""
        self._weight = np.full(nodes - 1, PRIOR_ROUNDS)
        self._kept = PRIOR_ROUNDS * chance ** np.arange(1, nodes)
        self._last = np.zeros(nodes - 1, np.int64)
        self._round = 0
        self._best, self._since = -1, 0

    def expected_tokens(self) -> NDArray[np.float64]:
        """Tokens of a round, the bonus included, by number of nodes from 1 on."""
        return np.cumsum([1.0, *(self._kept / self._weight)])

    def observe(self, known: NDArray[np.bool_], kept: NDArray[np.bool_]) -> None:
        """One round: for each node, whether it was seen at all and whether it was kept.

        Evidence ages with the rounds, seen or not, but only fresh evidence moves an estimate: after
        a long time without, a single round says much.
        """
        seen = np.flatnonzero(known)
        fade = KEEP ** (self._round - self._last[seen])
        self._weight[seen] = self._weight[seen] * fade + 1
        self._kept[seen] = self._kept[seen] * fade + kept[seen]
        self._last[seen] = self._round

    def look_up(self, best: int, losses: NDArray[np.float64]) -> int:
        """The place of the size to take: ``best``, and now and then a larger one.

        Called once a round. Drafts may have become better meanwhile, and a small tree cannot tell.

        Args:
            best: place of the size that pays most.
            losses: by place, what a round is expected to lose to the best one, in rounds of it.
        """
        self._round += 1
        if best != self._best:
            self._best, self._since = best, self._round
        waited = self._round - self._since
        if waited < LOOK_AFTER:
            return best
        place = int(np.flatnonzero(losses <= LOOK_SHARE * waited)[-1])
        if place > best:
            self._since = self._round
        return max(place, best)
