"""ONNX Runtime over the bundle's standard graph: one session serves every shape of a role.

The symbolic graph is used, so weights are held once. Buffers are bound by address: a round
allocates nothing and copies nothing but the accepted rows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from pspec.errors import EngineError
from pspec.runtime.cache import Cache
from pspec.runtime.engine import Array, Binding
from pspec.runtime.manifest import CacheSpec, GraphSpec, ShapePlan, TensorSpec

_TYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "int32": np.int32,
    "bool": np.bool_,
}
_COUNT = {"target": "nodes", "drafter": "accepted"}
_FLEXIBLE = (1, 2, 4, 8, 16, 32, 64)


def open_session(path: Path, threads: int | None, *, prepack: bool = True) -> Any:
    """Load a graph on the CPU.

    Args:
        path: the ONNX file, its weights beside it.
        threads: intra-op threads; None lets ONNX Runtime take one a core.
        prepack: re-lay weights for speed; without it they stay mapped from the file.

    Raises:
        EngineError: when ONNX Runtime cannot load the graph.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Target and drafter take turns on the same cores: a pool that goes on spinning after its run
    # slows the other one's down.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if threads:
        options.intra_op_num_threads = threads
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    with ort_errors(f"onnxruntime cannot load {path.name}"):
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def ort_errors(what: str) -> Iterator[None]:
    """Turn whatever ONNX Runtime raises into an ``EngineError`` of one line."""
    try:
        yield
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise EngineError(f"{what}: {reason}") from error


def strange_name(session: Any, inputs: Collection[str], outputs: Collection[str]) -> str | None:
    """What is wrong with the names of a session's inputs and outputs, or None.

    An input that the frozen graph has no use for may be missing from the session.
    """
    takes = {value.name for value in session.get_inputs()}
    gives = {value.name for value in session.get_outputs()}
    if takes - set(inputs):
        return f"its input {min(takes - set(inputs))} is not in the manifest"
    if gives - set(outputs):
        return f"its output {min(gives - set(outputs))} is not in the manifest"
    if set(outputs) - gives:
        return f"it has no output {min(set(outputs) - gives)}"
    return None


class OrtEngine:
    """:class:`~pspec.runtime.engine.Engine` on ONNX Runtime's CPU provider."""

    name = "onnxruntime"

    def __init__(
        self,
        folder: Path,
        graph: GraphSpec,
        cache: CacheSpec,
        plan: ShapePlan,
        threads: int | None = None,
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._session = open_session(folder / graph.file, threads)
        self._cache = Cache(cache, plan.batch, plan.buckets)
        self.lengths = self._cache.lengths
        self.seconds = 0.0
        self._bindings: dict[tuple[int, int], tuple[Binding, Array]] = {}
        self._io: dict[tuple[int, int, int], Any] = {}
        self._key = (0, 0)
        self._known = {value.name for value in self._session.get_inputs()}
        self._check_names()

    def fit(self, count: int) -> int:
        if count == self._plan.chunk:
            return count
        planned = self._plan.nodes if self._graph.role == "target" else self._plan.accepted
        sizes = sorted({*(size for size in _FLEXIBLE if size < planned), planned})
        return next((size for size in sizes if size >= count), count)

    def bind(self, count: int, logit_rows: int = 0) -> Binding:
        key = (count, logit_rows)
        if key not in self._bindings:
            self._bindings[key] = self._allocate(count, logit_rows)
        return self._bindings[key][0]

    def run(self, binding: Binding, adds: int) -> None:
        self._cache.reserve(adds)
        rows = binding.inputs["logit_rows"].shape[1] if "logit_rows" in binding.inputs else 0
        self._key = (binding.count, rows)
        binding.inputs["cache_length"][:] = self.lengths
        with ort_errors(f"onnxruntime cannot run {self._graph.file}"):
            io = self._io_binding((*self._key, self._cache.bucket))
            start = time.perf_counter()
            self._session.run_with_iobinding(io)
        self.seconds += time.perf_counter() - start

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        self._cache.append(row, self._bindings[self._key][1], nodes)

    def truncate(self, row: int, length: int) -> None:
        self._cache.truncate(row, length)

    def cache_rows(self, row: int) -> Array:
        return self._cache.rows(row)

    def _check_names(self) -> None:
        """What will be bound is what the graph has."""
        inputs = [*_per_layer("past", self._cache.view), *_names(_plain(self._graph.inputs))]
        outputs = [*_per_layer("new", self._cache.view), *_names(_plain(self._graph.outputs))]
        if strange := strange_name(self._session, inputs, outputs):
            raise EngineError(f"{self._graph.file} does not fit the manifest: {strange}")

    def _allocate(self, count: int, logit_rows: int) -> tuple[Binding, Array]:
        sizes = {
            "batch": self._plan.batch,
            _COUNT[self._graph.role]: count,
            "rows": logit_rows,
            "slots": 0,
        }
        inputs = {spec.name: _array(spec, sizes) for spec in _plain(self._graph.inputs)}
        outputs = {spec.name: _array(spec, sizes) for spec in _plain(self._graph.outputs)}
        layers, two, batch, heads, _, size = self._cache.view.shape
        rows = np.zeros((layers, two, batch, heads, count, size), np.float32)
        return Binding(count, inputs, outputs), rows

    def _io_binding(self, key: tuple[int, int, int]) -> Any:
        if key not in self._io:
            binding, rows = self._bindings[key[:2]]
            io = self._session.io_binding()
            past, new = self._cache.view, rows
            for name, array in {**binding.inputs, **_per_layer("past", past)}.items():
                if name in self._known:
                    io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            for name, array in {**binding.outputs, **_per_layer("new", new)}.items():
                io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            self._io[key] = io
        return self._io[key]


def _plain(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Inputs or outputs that are not cache tensors."""
    return [spec for spec in specs if not spec.name.startswith(("past_", "new_"))]


def _names(specs: Sequence[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs]


def _array(spec: TensorSpec, sizes: dict[str, int]) -> Array:
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
    return np.zeros(shape, _TYPES[spec.dtype])


def _per_layer(kind: str, rows: Array) -> dict[str, Array]:
    """Key and value tensors of each layer as views, by graph name."""
    parts = enumerate(("key", "value"))
    return {
        f"{kind}_{part}.{layer}": rows[layer, index]
        for index, part in parts
        for layer in range(rows.shape[0])
    }
