"""The size of a tree is the one that pays, by a count of its own; it follows what changes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from pspec.runtime.node_choice import LOOK_SHARE, AutoNodes, NodeBudget
from pspec.runtime.tree import Proposal, Tree, accept_greedy, best_first, root_only

SIZES = (1, 2, 4, 8, 16, 32)
SLOTS = 5
FLAT = (20.0, 21.0, 22.0, 24.0, 28.0, 36.0)  # memory bound: nodes are nearly free
STEEP = (8.0, 10.0, 13.0, 21.0, 36.0, 66.0)  # compute bound
DRAFT = 3.0


@dataclass
class FixedCosts:
    """Milliseconds by size, whatever the cache holds; ``draft`` comes on top from two nodes on."""

    verify: Sequence[float]
    draft: float = 0.0

    @property
    def pays_for_drafts(self) -> bool:
        return self.draft > 0

    def at(self, length: int) -> list[float]:
        del length
        return [self.verify[0], *(ms + self.draft for ms in self.verify[1:])]


class World:
    """A target that says candidate r of every slot with probability ``chances[r]``."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def proposal(self, chances: Sequence[float]) -> Proposal:
        ids = np.tile(np.arange(1, len(chances) + 1, dtype=np.int32), (SLOTS, 1))
        return Proposal(ids, np.log(np.tile(np.asarray(chances, np.float32), (SLOTS, 1))))

    def next_tokens(self, tree: Tree, chances: Sequence[float]) -> list[int]:
        weights = [*chances, 1 - sum(chances)]  # the last token is no candidate
        said = self._rng.choices(range(1, len(weights) + 1), weights, k=SLOTS + 1)
        return [said[depth] for depth in tree.depths]

    def round(
        self, budget: NodeBudget, chances: Sequence[float], drafter: Sequence[float], match: int = 0
    ) -> int:
        """One round as :class:`~pspec.runtime.decode.Decoding` plays it; returns its nodes."""
        tree = root_only(0)
        if budget.drafts(10):
            whole = best_first(0, self.proposal(drafter), SIZES[-1], SLOTS)
            tree = budget.cut(whole, match, 10)
        path, bonus = accept_greedy(tree, self.next_tokens(tree, chances))
        budget.observe(tree, path, bonus)
        return len(tree)


def rates_of(chances: Sequence[float], costs: FixedCosts) -> dict[int, float]:
    """Tokens a millisecond by size, by brute force: the likeliest of all paths are a tree."""
    paths = (path for depth in range(1, SLOTS + 1) for path in product(chances, repeat=depth))
    likely = sorted((math.prod(path) for path in paths), reverse=True)
    return {
        size: (1 + sum(likely[: size - 1])) / ms
        for size, ms in zip(SIZES, costs.at(0), strict=True)
    }


def achieved(sizes: Counter[int], chances: Sequence[float], costs: FixedCosts) -> float:
    """Expected tokens a millisecond of a mixture of sizes, over those of the best size."""
    rates, ms = rates_of(chances, costs), dict(zip(SIZES, costs.at(0), strict=True))
    time = sum(count * ms[size] for size, count in sizes.items())
    return sum(count * ms[size] * rates[size] for size, count in sizes.items()) / (
        time * max(rates.values())
    )


def play(
    budget: NodeBudget, chances: Sequence[float], rounds: int, seed: int = 0, match: int = 0
) -> Counter[int]:
    """How often each size was verified."""
    world = World(seed)
    return Counter(world.round(budget, chances, chances, match) for _ in range(rounds))


@pytest.mark.parametrize("verify", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("draft", [0.0, DRAFT], ids=["free", "paid"])
@pytest.mark.parametrize(
    "chances",
    [(0.93, 0.02), (0.8, 0.1), (0.6, 0.2, 0.1), (0.4, 0.3, 0.2), (0.3, 0.1), (0.1, 0.05)],
    ids=str,
)
def test_the_choice_is_the_argmax_of_a_count_by_brute_force(
    verify: Sequence[float], draft: float, chances: Sequence[float]
) -> None:
    costs = FixedCosts(verify, draft)
    rates = rates_of(chances, costs)
    best, second = sorted(rates, key=rates.__getitem__, reverse=True)[:2]
    budget = AutoNodes(SIZES, costs)
    play(budget, chances, 300)

    sizes = play(budget, chances, 1000, seed=1)

    assert achieved(sizes, chances, costs) > 0.93, sizes
    if rates[second] < 0.9 * rates[best]:  # else two sizes are nearly as good as each other
        assert sizes.most_common(1)[0][0] == best, sizes


def test_drafts_that_are_never_kept_end_in_plain_decoding() -> None:
    costs = FixedCosts(FLAT, DRAFT)
    budget, world = AutoNodes(SIZES, costs), World()
    wrong = (0.0, 0.0)
    first = Counter(world.round(budget, wrong, (0.7, 0.2)) for _ in range(100))
    later = Counter(world.round(budget, wrong, (0.7, 0.2)) for _ in range(1000))

    assert first[1] > 80
    assert 0 < later.total() - later[1] < 60
    assert achieved(later, wrong, costs) > 1 - 1.5 * LOOK_SHARE


def test_nothing_is_drafted_in_a_plain_round_that_would_pay_for_it() -> None:
    budget, world = AutoNodes(SIZES, FixedCosts(STEEP, 50.0)), World()
    assert not budget.drafts(10)
    sizes = Counter(world.round(budget, (0.9,), (0.9,)) for _ in range(100))
    assert sizes[1] > 90


@pytest.mark.parametrize("draft", [0.0, DRAFT], ids=["free", "paid"])
@pytest.mark.parametrize("plain", [50, 1000])
def test_it_comes_back_when_drafts_are_kept_again(draft: float, plain: int) -> None:
    budget, world, guess = AutoNodes(SIZES, FixedCosts(FLAT, draft)), World(), (0.9, 0.05)
    for _ in range(plain):
        world.round(budget, (0.0, 0.0), guess)
    sizes = [world.round(budget, guess, guess) for _ in range(400)]

    assert Counter(sizes[200:])[1] < 10, "still plain"
    assert Counter(sizes[200:]).most_common(1)[0][0] >= 8


def test_long_matches_are_drafted_and_short_ones_are_not() -> None:
    budget, world = AutoNodes(SIZES, FixedCosts(STEEP)), World()
    short, long = Counter[int](), Counter[int]()
    for _ in range(300):
        short[world.round(budget, (0.05,), (1.0,), match=1)] += 1
        long[world.round(budget, (0.95,), (1.0,), match=9)] += 1

    assert short[1] > 270
    assert long[SLOTS + 1] + long[4] > 270


def test_a_plain_round_tells_whether_a_free_draft_was_right() -> None:
    costs = FixedCosts(STEEP)
    budget, proposal = AutoNodes(SIZES, costs), World().proposal((1.0,))
    whole = best_first(0, proposal, SIZES[-1], SLOTS)
    right = Tree(list(whole.tokens), whole.parents, whole.depths, whole.ranks)
    for _ in range(30):  # never right
        tree = budget.cut(whole, 2, 10)
        budget.observe(tree, [0], 99)
    sizes = []
    for _ in range(60):  # always right, and the target says so whatever was verified
        tree = budget.cut(right, 2, 10)
        sizes.append(len(tree))
        budget.observe(tree, list(range(len(tree))), 1)
    assert sizes[0] == 1
    assert min(place for place, size in enumerate(sizes) if size > 1) < 32
    assert max(sizes) >= 4


def test_what_was_not_offered_teaches_nothing() -> None:
    budgets = [AutoNodes(SIZES, FixedCosts(STEEP)) for _ in range(2)]
    whole = best_first(0, World().proposal((0.9,)), SIZES[-1], SLOTS)
    for budget in budgets:
        budget.cut(whole, 1, 10)
    for _ in range(50):  # an abandoned sequence, then rounds without room for drafts
        budgets[0].observe(root_only(7), [0], 3)
    assert [len(budget.cut(whole, 1, 10)) for budget in budgets] == [2, 2]


def test_a_small_tree_is_taken_whole_or_cut_to_a_shape() -> None:
    budget = AutoNodes(SIZES, FixedCosts((20.0, 20.1, 20.2, 20.3, 20.4, 20.5)))
    whole = best_first(0, World().proposal((1.0,)), SIZES[-1], 2)
    assert len(whole) == 3
    for _ in range(20):
        tree = budget.cut(whole, 9, 10)
        budget.observe(tree, list(range(len(tree))), 1)
        assert len(tree) in (1, 2, 3)
    assert len(tree) == 3


def test_the_same_rounds_give_the_same_choices() -> None:
    runs = []
    for _ in range(2):
        budget, world = AutoNodes(SIZES, FixedCosts(FLAT, DRAFT)), World(3)
        runs.append([world.round(budget, (0.5, 0.2), (0.6, 0.2)) for _ in range(200)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_costs_of_the_length_at_hand_decide() -> None:
    class Growing(FixedCosts):
        def at(self, length: int) -> list[float]:
            return [20.0, *(20.0 + length * size for size in SIZES[1:])]

    budget = AutoNodes(SIZES, Growing(FLAT))
    whole = best_first(0, World().proposal((0.9,)), SIZES[-1], SLOTS)
    assert len(budget.cut(whole, 9, 0)) == len(whole)
    assert len(budget.cut(whole, 9, 100)) == 1


def test_a_fixed_budget_takes_every_tree_whole() -> None:
    whole = best_first(0, World().proposal((0.5, 0.2)), 20, SLOTS)
    assert NodeBudget().drafts(3)
    assert NodeBudget().cut(whole, 0, 3) is whole


def test_the_first_nodes_of_a_tree_are_the_best_smaller_tree() -> None:
    proposal = World().proposal((0.5, 0.3, 0.1))
    whole = best_first(0, proposal, 40, SLOTS)
    for nodes in range(1, 41):
        assert whole.first(nodes) == best_first(0, proposal, nodes, SLOTS)
    assert whole.first(99) is whole
