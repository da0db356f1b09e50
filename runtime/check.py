"""What ``pspec verify`` asks of a bundle that its hashes cannot answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pspec.errors import BundleError
from pspec.runtime.bundle import Bundle
from pspec.runtime.engines import choose_engine, need_onnxruntime
from pspec.runtime.manifest import GraphSpec, Role, TensorSpec

TOLERANCE = 1e-3
"""Difference allowed between two graphs of one role, over the larger of 1 and the values' scale."""


def check_graphs(bundle: Bundle, engine: str | None) -> Iterator[str]:
    """Check the weight file against the tensor list and, with an engine, run every graph.

    Each static graph is compared with the symbolic one of its role on random inputs: they are
    frozen apart and share nothing but the weights.

    Yields:
        One line a check that passed.

    Raises:
        BundleError: naming what differs.
    """
    check_tensors(bundle)
    yield f"{len(bundle.manifest.tensors)} tensors lie inside the weight file"
    check_shapes(bundle)
    yield f"{len(bundle.manifest.graphs)} graphs have the shapes of the plan"
    if engine is None:
        return
    choose_engine(engine)
    need_onnxruntime()
    for role in sorted({graph.role for graph in bundle.manifest.graphs}):
        yield from _check_role(bundle, role)


def check_tensors(bundle: Bundle) -> None:
    """Every tensor has the bytes of its shape, inside the file."""
    size = bundle.manifest.files["graphs/weights.data"].bytes
    for tensor in bundle.manifest.tensors:
        expected = int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
        if tensor.bytes != expected or tensor.offset < 0 or tensor.offset + expected > size:
            raise BundleError(f"tensor {tensor.name} does not lie inside graphs/weights.data")


def check_shapes(bundle: Bundle) -> None:
    """A static graph has numbers only, and those that the symbolic graph's names stand for."""
    manifest = bundle.manifest
    for graph in manifest.graphs:
        whole = manifest.symbolic(graph.role)
        for mine, general in zip(
            (*graph.inputs, *graph.outputs), (*whole.inputs, *whole.outputs), strict=True
        ):
            if graph.sizes and mine.shape != _resolve(general, graph.sizes):
                raise BundleError(f"graph {graph.file}: {mine.name} has shape {list(mine.shape)}")


def _check_role(bundle: Bundle, role: Role) -> Iterator[str]:
    from pspec.runtime.ort import open_session

    whole = bundle.manifest.symbolic(role)
    reference = open_session(bundle.graphs / whole.file, None, prepack=False)
    for graph in bundle.manifest.graphs:
        if graph.role != role or graph.is_symbolic:
            continue
        feeds = _random_feeds(graph, bundle.manifest.target.vocab_size)
        session = open_session(bundle.graphs / graph.file, None, prepack=False)
        worst = 0.0
        for name, want, have in zip(
            [spec.name for spec in graph.outputs],
            reference.run(None, _known(reference, feeds)),
            session.run(None, _known(session, feeds)),
            strict=True,
        ):
            if want.dtype.kind == "f":
                scale = max(1.0, float(np.abs(want).max(initial=0.0)))
                worst = max(worst, float(np.abs(want - have).max(initial=0.0)) / scale)
            if not worst <= TOLERANCE:
                raise BundleError(f"graph {graph.file}: {name} differs by {worst:.1e}")
        yield f"{graph.file}: largest difference {worst:.1e}"


def _random_feeds(graph: GraphSpec, vocab: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {}
    for spec in graph.inputs:
        shape = [int(dim) for dim in spec.shape]
        if spec.dtype == "float32":
            feeds[spec.name] = rng.standard_normal(shape, dtype=np.float32)
        elif spec.dtype == "bool":
            feeds[spec.name] = np.broadcast_to(np.tri(shape[-1], dtype=np.bool_), shape).copy()
        else:
            feeds[spec.name] = np.ones(shape, np.int32)
    feeds["token_ids"][:] = rng.integers(0, vocab, feeds["token_ids"].shape)
    if "logit_rows" in feeds:
        feeds["logit_rows"][:] = 0
    return feeds


def _known(session: Any, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {value.name: feeds[value.name] for value in session.get_inputs()}


def _resolve(spec: TensorSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
