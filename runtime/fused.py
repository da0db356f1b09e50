"""The ``onnxruntime`` engine: a fused graph whose attention writes the cache where it lies.

Built by ``pspec build BUNDLE --engine onnxruntime`` into ``engines/onnxruntime/``. One session
serves every number of rows from two up: a call costs what its rows cost. New rows stand behind the
ones that count; committing an accepted path only closes its gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pspec.errors import EngineError, RequestError
from pspec.runtime.bundle import Bundle
from pspec.runtime.engine import Array, Binding
from pspec.runtime.manifest import FileHash, Manifest, Role, Strict, TensorSpec
from pspec.runtime.memory import check_memory
from pspec.runtime.ort import allocate, bind, check_names, open_session, per_layer, run_bound

ENGINES_FOLDER = "engines"
SIDECAR_FILE = "engine.json"
FORMAT = 1
_OVERHEAD = 64 * 1024 * 1024
"""Bytes for the session itself and what a call computes."""
_REBUILD = "rebuild it with: pspec build {} --engine onnxruntime"


class FusedGraph(Strict, frozen=True):
    """One role's graph: its file, and what goes in and out, cache included.

    ``packed_bytes`` are those of the weights that ONNX Runtime lays out anew in memory of its own;
    all others stay mapped from the bundle, and processes share them.
    """

    file: str
    packed_bytes: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class EngineParity(Strict, frozen=True):
    """Difference from the standard graphs, seen when the engine was built.

    Attributes:
        inputs: file of the static graph whose shape random inputs had, compared with unrounded
            products; or ``text``: a passage, compared as the engine runs.
        error: largest difference over the larger of 1 and the scale; for ``text`` the root mean
            square of the logits' difference over their spread.
        agree: share of tokens that are equal.
    """

    inputs: str
    error: float
    agree: float


class Sidecar(Strict, frozen=True):
    """``engine.json``: what the engine is, and of which bundle.

    Attributes:
        format: of this file and of the engine.
        source: checksum of the bundle's manifest.
        accuracy_level: 4 rounds the inputs of quantised products to 8 bits, 1 keeps them fp32.
        graphs: by role.
        files: size and hash of the engine's files.
        parity: against the standard graphs.
        built_with: versions and machine, for the record; the engine runs on others as well.
    """

    format: int
    source: str
    accuracy_level: int
    graphs: dict[Role, FusedGraph]
    files: dict[str, FileHash]
    parity: tuple[EngineParity, ...]
    built_with: dict[str, str]


def engine_folder(bundle: Bundle) -> Path:
    """Where the engine of a bundle lies."""
    return bundle.folder / ENGINES_FOLDER / "onnxruntime"


def read_sidecar(bundle: Bundle) -> Sidecar:
    """Read the sidecar and see that engine and bundle belong together.

    Raises:
        EngineError: for an engine that is missing, damaged or of another bundle, with the command
            that rebuilds it.
    """
    folder, rebuild = engine_folder(bundle), _REBUILD.format(bundle.folder)
    try:
        sidecar = msgspec.json.decode((folder / SIDECAR_FILE).read_bytes(), type=Sidecar)
    except OSError as error:
        raise EngineError(f"{folder}: no engine is built; {rebuild}") from error
    except msgspec.DecodeError as error:
        raise EngineError(f"{folder / SIDECAR_FILE}: {error}; {rebuild}") from error
    if sidecar.format != FORMAT:
        raise EngineError(f"{folder}: format {sidecar.format}, expected {FORMAT}; {rebuild}")
    if sidecar.source != bundle.manifest.checksum:
        raise EngineError(f"{folder} was built from another bundle; {rebuild}")
    for name, entry in sidecar.files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size} bytes, expected {entry.bytes}"
            raise EngineError(f"{folder}: {name} {found}; {rebuild}")
    return sidecar


_Buffers = tuple[dict[str, Array], dict[str, Array]]


class FusedEngine:
    """:class:`~pspec.runtime.engine.Engine` over one role's fused graph.

    Args:
        bundle: with the engine in it.
        role: target or drafter.
        threads: None takes one a core.
        batch: rows of the cache; the bundle's number by default.
        context: longest sequence of a row, at most the bundle's, which is the default.
        profile: where :meth:`end_profile` begins the name of its file; None measures nothing.
    """

    name = "onnxruntime"

    def __init__(
        self,
        bundle: Bundle,
        role: Role,
        threads: int | None,
        *,
        batch: int | None = None,
        context: int | None = None,
        profile: Path | None = None,
    ) -> None:
        manifest = bundle.manifest
        self._graph = read_sidecar(bundle).graphs[role]
        self._role = role
        self._context = context or manifest.plan.max_context
        size = self._graph.packed_bytes + cache_bytes(manifest, role, batch, context) + _OVERHEAD
        check_memory(
            size,
            f"the {role} with {batch or manifest.plan.batch} x {self._context} tokens of context",
            "close something, use fewer rows or a shorter context"
            if batch or context
            else "close something, or export with --precision int4 or a smaller --max-context",
        )
        path = engine_folder(bundle) / self._graph.file
        self._session = open_session(path, threads, weights=bundle.folder, profile=profile)
        inputs = [spec.name for spec in self._graph.inputs]
        outputs = [spec.name for spec in self._graph.outputs]
        check_names(self._session, self._graph.file, inputs, outputs)
        self._cache = make_cache(manifest, role, batch, context)
        self.lengths = np.zeros(self._cache.shape[2], np.int32)
        self.seconds = 0.0
        self._bindings: dict[tuple[int, int], Binding] = {}
        self._arrays: dict[tuple[int, int, int], _Buffers] = {}
        self._warm()

    def fit(self, count: int) -> int:
        # ONNX Runtime computes a lone row by other kernels than several, which agree among each
        # other to the last bit whatever their number. A second row costs little; and with it plain
        # and speculative decoding are exactly the same, where rounded inputs would make the two
        # kernels drift apart.
        return max(count, 2)

    def bind(self, count: int, logit_rows: int = 0) -> Binding:
        key = (count, logit_rows)
        if key not in self._bindings:
            self._bindings[key] = self.bind_rows(count, logit_rows, range(len(self.lengths)))
        return self._bindings[key]

    def bind_rows(self, count: int, logit_rows: int, rows: range) -> Binding:
        """Buffers for some neighbouring rows of the batch, which run without the others.

        ONNX Runtime's attention takes several rows of one token each, or one row of several.
        A binding is made anew by each call; those of one shape share their buffers.
        """
        inputs, outputs = (
            {name: array[: len(rows)] for name, array in part.items()}
            for part in self._buffers(count, logit_rows, len(rows))
        )
        cache = self._cache[:, :, rows.start : rows.stop]
        io = bind(
            self._session,
            {**inputs, **per_layer("past", cache)},
            {**outputs, **per_layer("present", cache)},
        )
        return _Bound(count, inputs, outputs, rows, io)

    def run(self, binding: Binding, adds: int) -> None:
        assert isinstance(binding, _Bound)
        lengths = self.lengths[binding.rows.start : binding.rows.stop]
        needed = int(lengths.max()) + adds
        if needed > self._context:
            raise RequestError(f"{needed} cache rows do not fit the context of {self._context}")
        binding.inputs["cache_length"][:] = lengths
        self.seconds += run_bound(self._session, binding.io, self._graph.file)

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        start = int(self.lengths[row])
        stop = start + len(nodes)
        if list(nodes) != list(range(len(nodes))):  # a chain lies where it belongs
            rows = self._cache[:, :, row]
            rows[:, :, :, start:stop] = rows.take(np.add(nodes, start), axis=3)
        self.lengths[row] = stop

    def truncate(self, row: int, length: int) -> None:
        self.lengths[row] = min(length, int(self.lengths[row]))

    def cache_rows(self, row: int) -> Array:
        rows: Array = self._cache[:, :, row, :, : self.lengths[row]].copy()
        return rows

    def end_profile(self) -> Path:
        """Write the time of every operator so far (JSON of Chrome's trace format)."""
        return Path(self._session.end_profiling())

    def move(self, source: int, row: int) -> None:
        """Put the sequence of batch row ``source`` in the place of ``row``."""
        length = self.lengths[row] = self.lengths[source]
        self._cache[:, :, row, :, :length] = self._cache[:, :, source, :, :length]
        self.lengths[source] = 0

    def _warm(self) -> None:
        """One call whose rows do not count: the first is slower than those that follow."""
        binding = self.bind_rows(1, 1 if self._role == "target" else 0, range(1))
        if "token_count" in binding.inputs:
            binding.inputs["token_count"][:] = 1
        self.run(binding, 0)
        self.seconds = 0.0

    def _buffers(self, count: int, logit_rows: int, rows: int) -> _Buffers:
        """Arrays that bindings of one shape share: only one of them runs at a time."""
        rows = len(self.lengths) if count == 1 else rows
        key = (count, logit_rows, rows)
        if key not in self._arrays:
            counted = "nodes" if self._role == "target" else "accepted"
            sizes = {"batch": rows, "rows": logit_rows, counted: count}
            self._arrays[key] = (
                allocate(self._graph.inputs, sizes),
                allocate(self._graph.outputs, sizes),
            )
        return self._arrays[key]


@dataclass(frozen=True)
class _Bound(Binding):
    """A binding of some rows, with what ONNX Runtime runs it by."""

    rows: range
    io: Any


def make_cache(
    manifest: Manifest, role: Role, batch: int | None = None, context: int | None = None
) -> Array:
    """A zeroed cache ``[layers, 2, B, heads, S, D]`` for the longest context and one call more.

    Rows are written before it is known which of them will count. Zeros, since a weight of 0 times
    a stray NaN would be NaN; the system hands out pages only as they are written.
    """
    spec, rows = manifest.cache(role), batch or manifest.plan.batch
    slots = cache_slots(manifest, context)
    return np.zeros((spec.layers, 2, rows, spec.heads, slots, spec.size), np.float32)


def cache_bytes(
    manifest: Manifest, role: Role, batch: int | None = None, context: int | None = None
) -> int:
    """Bytes of the cache that :func:`make_cache` makes."""
    spec, rows = manifest.cache(role), batch or manifest.plan.batch
    return 4 * spec.layers * 2 * rows * spec.heads * cache_slots(manifest, context) * spec.size


def cache_slots(manifest: Manifest, context: int | None = None) -> int:
    """Rows of a cache: of the longest context, and those that one more call writes behind them."""
    plan = manifest.plan
    masks = manifest.drafter.slots if manifest.drafter else 0
    return (context or plan.max_context) + max(plan.chunk, plan.nodes, plan.accepted) + masks
