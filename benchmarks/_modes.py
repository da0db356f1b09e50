"""Ways of drafting over one bundle, and what each of them must commit round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, log

import numpy as np

from pspec.runtime.decode import Decoding, Stats, TreeSettings
from pspec.runtime.generate import DraftMode, GenerationConfig, Generator
from pspec.runtime.manifest import Manifest
from pspec.runtime.replay import Kind, ReplayDrafter
from pspec.runtime.tree import TreePlan

CHAIN = "second-best chain"
MODES = ("plain", "lookup", "bundle", "oracle", "anti-oracle", "second-best", CHAIN)
_CONFIGURED: dict[str, DraftMode] = {"plain": "off", "lookup": "lookup", "bundle": "bundle"}
_REPLAYED: dict[str, Kind] = {
    "oracle": "oracle",
    "anti-oracle": "anti-oracle",
    "second-best": "second-best",
    CHAIN: "second-best",
}


@dataclass(frozen=True)
class Answer:
    """What one mode generated.

    Attributes:
        ids: tokens after the prompt.
        blocks: tokens committed by each round; the one that prefill yields belongs to none.
        stats: the loop's own account of it.
        seconds: the rounds by this module's clock, prefill excluded.
    """

    ids: list[int]
    blocks: list[int]
    stats: Stats
    seconds: float


def modes_of(manifest: Manifest) -> tuple[str, ...]:
    """The modes a bundle has; without a drafter there is no ``bundle``."""
    return tuple(mode for mode in MODES if mode != "bundle" or manifest.drafter is not None)


def slots_of(manifest: Manifest) -> int:
    """Longest continuation that a tree of the bundle holds."""
    return manifest.plan.accepted - 1


def answer(
    generator: Generator,
    mode: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    recorded: Sequence[int] = (),
) -> Answer:
    """Generate in one mode; replay drafters take ``recorded``, the plain answer."""
    decoding = _decoding(generator, mode, [*prompt, *recorded])
    blocks = decoding.run(prompt, max_new_tokens)
    next(blocks)
    start = time.perf_counter()
    sizes = [len(block.tokens) for block in blocks]
    seconds = time.perf_counter() - start
    return Answer(decoding.ids[len(prompt) :], sizes, decoding.stats, seconds)


def _decoding(generator: Generator, mode: str, ids: Sequence[int]) -> Decoding:
    config = GenerationConfig(draft=_CONFIGURED.get(mode, "off"))
    if mode in _CONFIGURED:
        return generator.decode(config)
    manifest = generator.bundle.manifest
    slots = slots_of(manifest)
    drafter = ReplayDrafter(_REPLAYED[mode], ids, slots, manifest.target.vocab_size)
    decoding = generator.decode(config, drafter)
    if mode == CHAIN:
        chain = TreePlan(tuple(range(slots)), (0,) * slots)
        decoding.tree = TreeSettings(manifest.plan.nodes, chain)
    return decoding


def expected_blocks(
    mode: str, tokens: int, max_new_tokens: int, *, nodes: int, slots: int
) -> list[int] | None:
    """Tokens each round of a mode must commit, worked out apart from the loop and its trees.

    Args:
        mode: one of :data:`MODES`.
        tokens: length of the answer.
        max_new_tokens: its budget: trees get shallower towards it.
        nodes: nodes of a tree, node 0 included.
        slots: longest continuation.

    Returns:
        None for a mode whose luck is its own (``lookup``, ``bundle``).
    """
    accepted: dict[str, Callable[[int], int]] = {
        "plain": lambda depth: 0,
        "oracle": lambda depth: min(depth, nodes - 1),
        "anti-oracle": lambda depth: 0,
        "second-best": lambda depth: second_path_depth(nodes, depth, second_best_pair()),
        CHAIN: lambda depth: 0,
    }
    if mode not in accepted:
        return None
    blocks = []
    done = 1
    while done < tokens:
        left, room = tokens - done, max_new_tokens - done
        # No deeper than the slots, than the recording, or than leaves room for the bonus.
        depth = min(slots, left, room - 1)
        blocks.append(min(accepted[mode](depth) + 1, left))
        done += blocks[-1]
    return blocks


def second_path_depth(nodes: int, depth: int, pair: tuple[float, float]) -> int:
    """How deep the path of second candidates reaches in a best-first tree.

    Every slot offers a first and a second candidate with the probabilities ``pair``. A node whose
    path has ``a`` firsts and ``b`` seconds has ``pair[0] ** a * pair[1] ** b``, and there are
    ``comb(a + b, a)`` of them; the tree holds the ``nodes`` - 1 likeliest within ``depth``.
    """
    first, second = log(pair[0]), log(pair[1])
    reached = 0
    for level in range(1, depth + 1):
        ahead = sum(
            comb(a + b, a)
            for a in range(depth + 1)
            for b in range(depth + 1 - a)
            if a + b and a * first + b * second > level * second
        )
        if ahead + 1 > nodes - 1:
            break
        reached = level
    return reached


def second_best_pair() -> tuple[float, float]:
    """Probabilities of the wrong and the right candidate, as the replay drafter states them."""
    drafter = ReplayDrafter("second-best", [0, 0], 1, 2)
    drafter.start(0)
    proposal = drafter.propose()
    assert proposal is not None
    first, second = np.exp(proposal.logprobs[0].astype(np.float64)).tolist()
    return first, second
