"""Do the exported graphs compute what PyTorch computes? Asked on fixed and on random inputs.

The reference is the torch modules' own forward; the graphs run in ONNX Runtime. Weights stay mapped
from the bundle's file, so a check needs no second copy of a large model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from pspec.export.trace import size_of
from pspec.models.graph import GraphModel, Value, run_graph
from pspec.runtime.compare import compare_outputs
from pspec.runtime.ort import open_session

Feeds = dict[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]


class ParityRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Difference between a graph and PyTorch on one set of inputs.

    Attributes:
        graph: file name.
        inputs: ``fixed`` or ``random``.
        error: largest absolute difference of float outputs, over the larger of 1 and their scale.
        agree: share of integer outputs (tokens) that are equal.
        near_ties: unequal tokens whose scores are closer than the tolerance.
        passed: whether the graph is good.
    """

    graph: str
    inputs: str
    error: float
    agree: float
    near_ties: int
    passed: bool


def make_feeds(model: GraphModel, sizes: Mapping[str, int], kind: str, vocab: int) -> Feeds:
    """Inputs for a shape: a branching tree over caches filled to different lengths."""
    seed = zlib.crc32(repr((kind, sorted(sizes.items()))).encode())
    rng = np.random.default_rng(seed)
    feeds = {value.name: _fill(value, sizes, kind, rng) for value in model.inputs}
    batch, count = feeds["token_ids"].shape
    room = max(sizes["slots"] - count, 0)
    shares = room // np.arange(2, batch + 2)
    filled = shares if kind == "fixed" else rng.integers(0, room + 1, batch)
    feeds["cache_length"][:] = filled
    feeds["token_ids"][:] = rng.integers(0, vocab, feeds["token_ids"].shape)
    if "tree_mask" in feeds:
        depths = _fill_tree(feeds["tree_mask"], rng)
        # A context shorter than the shape has no positions for all of its nodes.
        feeds["position_ids"][:] = np.minimum(filled[:, None] + depths, sizes["slots"] - 1)
        feeds["logit_rows"][:] = np.arange(sizes["rows"]) + count - sizes["rows"]
    if "token_count" in feeds:
        most = min(count, sizes["slots"])
        feeds["token_count"][:] = rng.integers(1, most + 1, feeds["token_count"].shape)
    return feeds


def _fill_tree(tree_mask: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Set the mask of a random tree; returns the depth of every node."""
    count = tree_mask.shape[1]
    depths = np.zeros(count, np.int32)
    tree_mask[:, 0, 0] = True
    for node in range(1, count):
        parent = int(rng.integers(0, node))
        tree_mask[:, node] = tree_mask[:, parent]
        tree_mask[:, node, node] = True
        depths[node] = depths[parent] + 1
    return depths


def torch_outputs(model: GraphModel, feeds: Feeds) -> Outputs:
    """The reference."""
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    return {name: tensor.numpy() for name, tensor in run_graph(model, tensors).items()}


def compare_graph(
    path: Path, cases: Iterable[tuple[str, Feeds, Outputs]], threads: int | None = None
) -> list[ParityRow]:
    """Run one graph file on every case and compare."""
    session = open_session(path, threads, prepack=False)
    known = {value.name for value in session.get_inputs()}
    rows = []
    for kind, feeds, wanted in cases:
        given = {name: array for name, array in feeds.items() if name in known}
        names = list(wanted)
        got = dict(zip(names, session.run(names, given), strict=True))
        rows.append(_compare(path.name, kind, got, wanted))
    return rows


def _compare(graph: str, kind: str, got: Outputs, wanted: Outputs) -> ParityRow:
    found = compare_outputs(got, wanted)
    return ParityRow(graph, kind, found.error, found.agree, found.near_ties, found.passed)


def _fill(value: Value, sizes: Mapping[str, int], kind: str, rng: Any) -> NDArray[Any]:
    shape = [size_of(dim, sizes) for dim in value.shape]
    if value.dtype in ("int32", "bool"):
        return np.zeros(shape, value.dtype)
    if kind == "fixed":
        count = int(np.prod(shape))
        return np.sin(np.arange(count, dtype=np.float64)).astype(np.float32).reshape(shape)
    return rng.standard_normal(shape, dtype=np.float32)  # type: ignore[no-any-return]


def passed(rows: Sequence[ParityRow]) -> bool:
    """Whether every row is good."""
    return all(row.passed for row in rows)
