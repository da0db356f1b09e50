"""``pspec verify``: does a bundle hold what it says, and do its graphs compute the same?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pspec.errors import BundleError
from pspec.runtime.bundle import Bundle, check_hashes, open_bundle
from pspec.runtime.compare import Outputs, compare_outputs
from pspec.runtime.engines import choose_engine, need_onnxruntime
from pspec.runtime.manifest import GraphSpec, Role, StoredTensor, TensorSpec
from pspec.runtime.probe import FILLINGS, Feeds, probe_feeds


def check_bundle(folder: Path, engine: str | None) -> Iterator[str]:
    """Check hashes, tensors and shapes and, with an engine, run every graph.

    Each static graph is compared with the symbolic one of its role on random inputs: they are
    frozen apart and share nothing but the weights.

    Yields:
        One line a check that passed.

    Raises:
        EngineError: when the engine cannot run here; asked before anything else.
        BundleError: naming what differs.
    """
    if engine is not None:
        choose_engine(engine)
        need_onnxruntime()
    bundle = open_bundle(folder)
    check_hashes(bundle)
    yield f"{len(bundle.manifest.files)} files have their sha256"
    check_tensors(bundle)
    yield f"{len(bundle.manifest.tensors)} tensors lie inside the weight file"
    check_shapes(bundle)
    yield f"{len(bundle.manifest.graphs)} graphs have the shapes of the plan"
    if engine is not None:
        for role in sorted({graph.role for graph in bundle.manifest.graphs}):
            yield from _check_role(bundle, role)


def check_tensors(bundle: Bundle) -> None:
    """Every tensor has the bytes of its shape, inside the file.

    Raises:
        BundleError: naming the tensor.
    """
    size = bundle.manifest.files["graphs/weights.data"].bytes
    for tensor in bundle.manifest.tensors:
        expected = _bytes(tensor)
        if tensor.bytes != expected or tensor.offset < 0 or tensor.offset + expected > size:
            raise BundleError(f"tensor {tensor.name} does not lie inside graphs/weights.data")


def check_shapes(bundle: Bundle) -> None:
    """A static graph has the symbolic one's inputs and outputs, with numbers for its names.

    Raises:
        BundleError: naming the graph and what is wrong with it.
    """
    manifest = bundle.manifest
    for graph in manifest.graphs:
        whole = manifest.symbolic(graph.role)
        _check_specs(graph, graph.inputs, whole.inputs, "inputs")
        _check_specs(graph, graph.outputs, whole.outputs, "outputs")


def _check_specs(
    graph: GraphSpec, mine: Sequence[TensorSpec], general: Sequence[TensorSpec], side: str
) -> None:
    names, wanted = [spec.name for spec in mine], [spec.name for spec in general]
    if names != wanted:
        odd = sorted(set(names) ^ set(wanted)) or names
        raise BundleError(
            f"graph {graph.file}: its {side} are not those of the symbolic graph: {', '.join(odd)}"
        )
    for spec, whole in zip(mine, general, strict=True):
        if spec.dtype != whole.dtype:
            raise BundleError(f"graph {graph.file}: {spec.name} has type {spec.dtype}")
        if graph.sizes and spec.shape != _resolve(whole, graph.sizes):
            raise BundleError(f"graph {graph.file}: {spec.name} has shape {list(spec.shape)}")


def _check_role(bundle: Bundle, role: Role) -> Iterator[str]:
    whole = bundle.manifest.symbolic(role)
    reference = _open(bundle, whole)
    for graph in bundle.manifest.graphs:
        if graph.role != role or graph.is_symbolic:
            continue
        session, worst = _open(bundle, graph), 0.0
        for filling in FILLINGS:
            feeds = probe_feeds(graph, bundle.manifest.target.vocab_size, filling)
            found = compare_outputs(_run(session, graph, feeds), _run(reference, whole, feeds))
            if found.faults:
                raise BundleError(f"graph {graph.file}: {found.faults[0]}")
            worst = max(worst, found.error)
        yield f"{graph.file}: largest difference {worst:.1e}"


def _open(bundle: Bundle, graph: GraphSpec) -> Any:
    """A session whose inputs and outputs are those of the manifest."""
    from pspec.runtime.ort import open_session, strange_name

    session = open_session(bundle.graphs / graph.file, None, prepack=False)
    strange = strange_name(
        session, [spec.name for spec in graph.inputs], [spec.name for spec in graph.outputs]
    )
    if strange:
        raise BundleError(f"graph {graph.file}: {strange}; export the bundle again")
    return session


def _run(session: Any, graph: GraphSpec, feeds: Feeds) -> Outputs:
    from pspec.runtime.ort import ort_errors

    names = [spec.name for spec in graph.outputs]
    # An input that the frozen graph has no use for may be missing from the session.
    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    with ort_errors(f"onnxruntime cannot run {graph.file}"):
        return dict(zip(names, session.run(names, given), strict=True))


def _bytes(tensor: StoredTensor) -> int:
    count = int(np.prod(tensor.shape, dtype=np.int64))
    if tensor.dtype == "int4":  # two to a byte
        return -(-count // 2)
    try:
        return count * np.dtype(tensor.dtype).itemsize
    except TypeError as error:
        raise BundleError(f"tensor {tensor.name} has an unknown type {tensor.dtype!r}") from error


def _resolve(spec: TensorSpec, sizes: dict[str, int]) -> tuple[int | str, ...]:
    """The shape with numbers for names; a name without one stays, and equals no number."""
    return tuple(dim if isinstance(dim, int) else sizes.get(dim, dim) for dim in spec.shape)
