"""Random inputs for a graph that mean something: a branching tree over a partly filled cache."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pspec.runtime.manifest import GraphSpec, TensorSpec
from pspec.runtime.tree import Tree, fill_mask

FILLINGS = ("part", "full")
"""How much of the cache counts: any part of it in each row, or all that the new rows leave."""

Feeds = dict[str, NDArray[Any]]


def probe_feeds(graph: GraphSpec, vocab: int, filling: str) -> Feeds:
    """Inputs of a static graph, the same at every call.

    Args:
        graph: its shapes and sizes; caches and features are filled with noise.
        vocab: token ids are below it.
        filling: one of :data:`FILLINGS`.
    """
    rng = np.random.default_rng(zlib.crc32(f"{graph.file} {filling}".encode()))
    feeds = {spec.name: _random(spec, rng) for spec in graph.inputs}
    tokens, slots = feeds["token_ids"], graph.sizes["slots"]
    batch, count = tokens.shape
    # A context shorter than the shape has neither room in its cache nor positions for all nodes.
    room = max(slots - count, 0)
    filled = np.full(batch, room) if filling == "full" else rng.integers(0, room + 1, batch)
    feeds["cache_length"][:] = filled
    tokens[:] = rng.integers(0, vocab, tokens.shape)
    if graph.role == "drafter":
        feeds["token_count"][:] = rng.integers(1, min(count, slots) + 1, batch)
        return feeds
    rows = feeds["logit_rows"]
    rows[:] = (rng.integers(0, count) + np.arange(rows.shape[1])) % count
    for row in range(batch):
        tree = _random_tree(tokens[row].tolist(), rng)
        fill_mask(tree, feeds["tree_mask"][row])
        feeds["position_ids"][row] = np.minimum(filled[row] + np.asarray(tree.depths), slots - 1)
    return feeds


def _random_tree(tokens: list[int], rng: np.random.Generator) -> Tree:
    """Every node hangs under any of those before it."""
    parents, depths = [-1], [0]
    for node in range(1, len(tokens)):
        parents.append(int(rng.integers(0, node)))
        depths.append(depths[parents[node]] + 1)
    return Tree(tokens, parents, depths, [0] * len(tokens))


def _random(spec: TensorSpec, rng: np.random.Generator) -> NDArray[Any]:
    shape = [int(dim) for dim in spec.shape]
    if spec.dtype in ("int32", "bool"):
        return np.zeros(shape, spec.dtype)
    return rng.standard_normal(shape, dtype=np.float32).astype(spec.dtype)
