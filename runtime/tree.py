"""Token trees: which drafted continuations one target call verifies together.

A parallel drafter gives one distribution per depth, the same under every parent, so the best tree
under a node budget is the best-first enumeration of products of its per-slot probabilities. Shapes
stay static: parents, mask and positions are data.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pspec.errors import ConfigError


@dataclass(frozen=True)
class Proposal:
    """Candidates of each slot, best first.

    Attributes:
        ids: ``[k, m]`` int32 token ids.
        logprobs: ``[k, m]`` float32, descending along m.
        match: how many tokens before it a continuation found in the text shares with that text;
            0 for a model's.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    match: int = 0


@dataclass(frozen=True)
class Tree:
    """Nodes in an order in which parents precede children; node 0 is the last committed token.

    Attributes:
        tokens: token of each node.
        parents: node number of each parent, -1 for node 0.
        depths: distance from node 0.
        ranks: which candidate of its slot a node is, 0 for node 0.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    ranks: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    def first(self, nodes: int) -> Tree:
        """The first ``nodes`` nodes: a tree again, because parents precede children."""
        if nodes >= len(self):
            return self
        lists = (self.tokens, self.parents, self.depths, self.ranks)
        return Tree(*(values[:nodes] for values in lists))


def root_only(token: int) -> Tree:
    """The tree of a plain step."""
    return Tree([token], [-1], [0], [0])


def best_first(root: int, proposal: Proposal, nodes: int, depth: int) -> Tree:
    """The likeliest ``nodes`` - 1 continuations, none deeper than ``depth``.

    Best-first by cumulative log-probability; among equals, the shallower node and the better rank.
    """
    ids, logprobs = proposal.ids.tolist(), proposal.logprobs.tolist()
    tree = root_only(root)
    slots, ranks = min(len(ids), depth), len(ids[0]) if ids else 0
    if not slots or not ranks:
        return tree
    # (minus score, depth, rank, parent, score of the parent)
    heap = [(-logprobs[0][0], 1, 0, 0, 0.0)]
    while heap and len(tree) < nodes:
        cost, level, rank, parent, above = heapq.heappop(heap)
        node = _add(tree, ids[level - 1][rank], parent, level, rank)
        if rank + 1 < ranks:
            score = above + logprobs[level - 1][rank + 1]
            heapq.heappush(heap, (-score, level, rank + 1, parent, above))
        if level < slots:
            heapq.heappush(heap, (cost - logprobs[level][0], level + 1, 0, node, -cost))
    return tree


@dataclass(frozen=True)
class TreePlan:
    """A tree planned ahead: node i + 1 hangs under ``parents[i]`` and takes rank ``ranks[i]``."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks):
            raise ConfigError("tree plan: parents and ranks differ in length")
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise ConfigError(f"tree plan: parent {parent} of node {node} does not precede it")
        for node, rank in enumerate(self.ranks, start=1):
            if rank < 0:
                raise ConfigError(f"tree plan: rank {rank} of node {node} is negative")
        pairs = list(zip(self.parents, self.ranks, strict=True))
        if len(set(pairs)) != len(pairs):
            raise ConfigError("tree plan: two siblings take the same rank")


def planned(root: int, proposal: Proposal, plan: TreePlan, nodes: int, depth: int) -> Tree:
    """Fill a plan with a proposal's tokens; nodes that do not exist or do not fit are left out."""
    ids = proposal.ids.tolist()
    tree = root_only(root)
    placed = {0: 0}
    for number, (parent, rank) in enumerate(zip(plan.parents, plan.ranks, strict=True), start=1):
        if parent not in placed or len(tree) == nodes:
            continue
        level = tree.depths[placed[parent]] + 1
        if level <= min(len(ids), depth) and rank < len(ids[level - 1]):
            placed[number] = _add(tree, ids[level - 1][rank], placed[parent], level, rank)
    return tree


def fill_mask(tree: Tree, mask: NDArray[np.bool_]) -> None:
    """Write ancestor-or-self into ``mask[N, N]``; padding nodes see only themselves."""
    mask[:] = False
    np.fill_diagonal(mask, True)
    for node in range(1, len(tree)):
        mask[node] |= mask[tree.parents[node]]


def accept_greedy(tree: Tree, next_tokens: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's argmax down the tree.

    Args:
        tree: the verified tree.
        next_tokens: the target's argmax at each node.

    Returns:
        The accepted path (node 0 first) and the bonus token at its end.
    """
    path = [0]
    wanted = next_tokens[0]
    for node in range(1, len(tree)):  # parents precede children, so one pass finds the path
        if tree.parents[node] == path[-1] and tree.tokens[node] == wanted:
            path.append(node)
            wanted = next_tokens[node]
    return path, wanted


def _add(tree: Tree, token: int, parent: int, depth: int, rank: int) -> int:
    tree.tokens.append(token)
    tree.parents.append(parent)
    tree.depths.append(depth)
    tree.ranks.append(rank)
    return len(tree) - 1
