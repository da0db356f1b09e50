"""Trees against enumeration: every path is listed, and none of the runtime's shortcuts is used."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pspec.errors import ConfigError
from pspec.runtime.manifest import ShapePlan
from pspec.runtime.target import chunk_sizes
from pspec.runtime.tree import (
    Proposal,
    Tree,
    TreePlan,
    accept_greedy,
    best_first,
    fill_mask,
    planned,
    root_only,
)

ROOT = 900


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Distinct tokens a slot; few different log-probabilities, so that many sums are equal."""
    slots, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    values = st.lists(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0]), min_size=ranks)
    rows = [sorted(draw(values)[:ranks], reverse=True) for _ in range(slots)]
    ids = np.arange(slots * ranks, dtype=np.int32).reshape(slots, ranks)
    return Proposal(ids, np.array(rows, np.float32))


def rank_paths(proposal: Proposal, depth: int) -> list[tuple[int, ...]]:
    """Every path of ranks down to ``depth``."""
    slots, ranks = proposal.ids.shape
    lengths = range(1, min(slots, depth) + 1)
    return [path for n in lengths for path in itertools.product(range(ranks), repeat=n)]


def node_paths(tree: Tree) -> list[tuple[int, ...]]:
    """Ranks on the way to each node but node 0; checks that a tree is well formed."""
    assert (tree.tokens[0], tree.parents[0], tree.depths[0]) == (ROOT, -1, 0)
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1
        paths.append((*paths[parent], tree.ranks[node]))
    assert len(set(paths)) == len(paths)
    return paths[1:]


def check_tokens(tree: Tree, proposal: Proposal) -> None:
    for node in range(1, len(tree)):
        assert tree.tokens[node] == proposal.ids[tree.depths[node] - 1, tree.ranks[node]]


@given(proposals(), st.integers(1, 14), st.integers(0, 5))
def test_best_first_is_the_sorted_enumeration(proposal: Proposal, nodes: int, depth: int) -> None:
    def key(path: tuple[int, ...]) -> tuple[float, int, int]:
        # Quarters add up exactly, so equal sums are equal numbers.
        score = sum(float(proposal.logprobs[slot, rank]) for slot, rank in enumerate(path))
        return -score, len(path), path[-1]

    tree = best_first(ROOT, proposal, nodes, depth)
    expected = sorted(rank_paths(proposal, depth), key=key)[: nodes - 1]
    assert [key(path) for path in node_paths(tree)] == [key(path) for path in expected]
    check_tokens(tree, proposal)


def test_best_first_by_hand() -> None:
    logprobs = np.log(np.array([[0.6, 0.3], [0.5, 0.4]], np.float32))
    proposal = Proposal(np.array([[10, 11], [20, 21]], np.int32), logprobs)
    # 0.6, 0.3 and its twin 0.6 * 0.5, then 0.24, 0.15, 0.12
    tree = best_first(ROOT, proposal, 9, 9)
    assert tree.tokens == [ROOT, 10, 11, 20, 21, 20, 21] or tree.tokens == [
        ROOT, 10, 20, 11, 21, 20, 21,
    ]  # fmt: skip
    assert best_first(ROOT, proposal, 9, 1).tokens == [ROOT, 10, 11]
    assert best_first(ROOT, proposal, 1, 9) == root_only(ROOT)
    assert best_first(ROOT, proposal, 9, 0) == root_only(ROOT)


def test_a_proposal_without_slots_gives_a_plain_step() -> None:
    empty = Proposal(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32))
    assert best_first(ROOT, empty, 8, 8) == root_only(ROOT)
    assert planned(ROOT, empty, TreePlan((0,), (0,)), 8, 8) == root_only(ROOT)


@st.composite
def plans(draw: st.DrawFn) -> TreePlan:
    pairs: dict[tuple[int, int], None] = {}
    for node in range(draw(st.integers(0, 12))):
        pairs[draw(st.integers(0, min(node, len(pairs)))), draw(st.integers(0, 5))] = None
    return TreePlan(tuple(p for p, _ in pairs), tuple(r for _, r in pairs))


@given(plans(), proposals(), st.integers(1, 14), st.integers(0, 5))
def test_a_planned_tree_is_the_plan_where_it_exists(
    plan: TreePlan, proposal: Proposal, nodes: int, depth: int
) -> None:
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(plan.parents, plan.ranks, strict=True):
        paths.append((*paths[parent], rank))
    there = set(rank_paths(proposal, depth))
    tree = planned(ROOT, proposal, plan, nodes, depth)
    assert node_paths(tree) == [path for path in paths[1:] if path in there][: nodes - 1]
    check_tokens(tree, proposal)


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((0, 1), (0,), "differ in length"),
        ((1,), (0,), "parent 1 of node 1"),
        ((0, -1), (0, 1), "parent -1 of node 2"),
        ((0, 0), (3, 3), "same rank"),
        ((0, 0), (0, -1), "rank -1 of node 2"),
    ],
)
def test_bad_plans_are_refused(
    parents: tuple[int, ...], ranks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TreePlan(parents, ranks)


@st.composite
def token_trees(draw: st.DrawFn) -> Tree:
    """Any tree over six tokens whose siblings differ."""
    tree = root_only(ROOT)
    for _ in range(draw(st.integers(0, 14))):
        grow(tree, draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 5)))
    return tree


def grow(tree: Tree, parent: int, token: int) -> bool:
    """Hang a node under ``parent`` unless it has a child of this token."""
    if (parent, token) in zip(tree.parents, tree.tokens, strict=True):
        return False
    tree.tokens.append(token)
    tree.parents.append(parent)
    tree.depths.append(tree.depths[parent] + 1)
    tree.ranks.append(0)
    return True


def lineage(tree: Tree, node: int) -> list[int]:
    """Node 0, ..., ``node``."""
    return [node] if node == 0 else [*lineage(tree, tree.parents[node]), node]


@given(token_trees(), st.integers(0, 4))
def test_mask_is_ancestor_or_self(tree: Tree, padding: int) -> None:
    size = len(tree) + padding
    mask = np.random.default_rng(size).random((size, size)) < 0.5  # what the round before left
    fill_mask(tree, mask)
    for row, column in itertools.product(range(size), range(size)):
        own = lineage(tree, row) if row < len(tree) else [row]
        assert mask[row, column] == (column in own)


NEXT = st.lists(st.integers(0, 5), min_size=16, max_size=16)


@given(token_trees(), NEXT)
def test_acceptance_is_the_longest_path_that_agrees(tree: Tree, wanted: list[int]) -> None:
    agreeing = []
    for node in range(len(tree)):
        path = lineage(tree, node)
        if all(tree.tokens[b] == wanted[a] for a, b in itertools.pairwise(path)):
            agreeing.append(path)
    longest = max(agreeing, key=len)
    assert sum(len(path) == len(longest) for path in agreeing) == 1
    assert accept_greedy(tree, wanted) == (longest, wanted[longest[-1]])


@given(token_trees(), NEXT, st.integers(0, 14), st.integers(0, 5))
def test_another_node_never_shortens_acceptance(
    tree: Tree, wanted: list[int], parent: int, token: int
) -> None:
    before, _ = accept_greedy(tree, wanted)
    grow(tree, min(parent, len(tree) - 1), token)
    after, _ = accept_greedy(tree, wanted)
    assert after[: len(before)] == before


def test_a_sibling_before_the_right_branch_changes_nothing() -> None:
    # [[0], [0, 0]] and [[0], [1], [0, 0]]: the right child is no longer the parent's neighbour.
    narrow = Tree([ROOT, 7, 8], [-1, 0, 1], [0, 1, 2], [0, 0, 0])
    wide = Tree([ROOT, 7, 5, 8], [-1, 0, 0, 1], [0, 1, 1, 2], [0, 0, 1, 0])
    assert accept_greedy(narrow, [7, 8, 9]) == ([0, 1, 2], 9)
    assert accept_greedy(wide, [7, 8, 0, 9]) == ([0, 1, 3], 9)


@given(proposals(), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_a_larger_budget_never_accepts_less(proposal: Proposal, right: list[int]) -> None:
    slots = len(proposal.ids)
    truth = [int(row[right[slot] % len(row)]) for slot, row in enumerate(proposal.ids)] + [0]
    lengths = []
    for nodes in range(1, 16):
        tree = best_first(ROOT, proposal, nodes, slots)
        path, _ = accept_greedy(tree, [truth[depth] for depth in tree.depths])
        lengths.append(len(path))
    assert lengths == sorted(lengths)


def plan_of(nodes: int, chunk: int) -> ShapePlan:
    return ShapePlan(batch=1, nodes=nodes, accepted=5, chunk=chunk, buckets=(1024,))


def fit_exactly(count: int) -> int:
    return count


@given(st.integers(0, 1000), st.integers(1, 256), st.sampled_from([16, 64, 256]))
def test_chunks_cover_a_prompt(tokens: int, nodes: int, chunk: int) -> None:
    sizes = chunk_sizes(tokens, plan_of(nodes, chunk), lambda _: chunk)
    assert set(sizes) <= {nodes, chunk}
    assert sum(sizes) >= tokens
    assert sum(sizes[:-1]) < max(tokens, 1)  # no call is empty
    # Whole chunks first: a piece that is not full is the last.
    assert sizes[: tokens // chunk] == [chunk] * (tokens // chunk)
    assert len(sizes) <= -(-tokens // min(nodes, chunk))


def test_a_short_prompt_does_not_cost_a_long_chunk() -> None:
    def fit_chunk(_: int) -> int:
        return 256

    assert sum(chunk_sizes(20, plan_of(8, 256), fit_chunk)) == 24
    assert sum(chunk_sizes(256 + 20, plan_of(8, 256), fit_chunk)) == 256 + 24
    assert chunk_sizes(250, plan_of(8, 256), fit_chunk) == [256]
    assert chunk_sizes(20, plan_of(128, 64), lambda _: 64) == [64]
    assert chunk_sizes(0, plan_of(8, 64), fit_chunk) == []


@given(st.integers(0, 1000), st.integers(1, 256), st.sampled_from([16, 64, 256]))
def test_an_engine_of_any_shape_pads_nothing(tokens: int, nodes: int, chunk: int) -> None:
    sizes = chunk_sizes(tokens, plan_of(nodes, chunk), fit_exactly)
    assert sum(sizes) == tokens
    assert len(sizes) == -(-tokens // chunk)
