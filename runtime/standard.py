"""The ``standard`` engine: ONNX Runtime over a bundle's own symbolic graphs, nothing built.

The reference for every other engine. One session serves every shape of a role, so weights are held
once. Buffers are bound by address: a round allocates nothing and copies nothing but accepted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pspec.runtime.bundle import Bundle
from pspec.runtime.cache import Cache
from pspec.runtime.engine import Array, Binding
from pspec.runtime.manifest import Role
from pspec.runtime.ort import allocate, bind, check_names, open_session, per_layer, run_bound

_COUNT = {"target": "nodes", "drafter": "accepted"}
_FLEXIBLE = (1, 2, 4, 8, 16, 32, 64)


class StandardEngine:
    """:class:`~pspec.runtime.engine.Engine` over one role's symbolic graph.

    Args:
        bundle: with the graph in it.
        role: target or drafter.
        threads: None takes one a core.
    """

    name = "standard"

    def __init__(self, bundle: Bundle, role: Role, threads: int | None) -> None:
        self._graph = bundle.manifest.symbolic(role)
        self._plan = bundle.manifest.plan
        self._session = open_session(bundle.graphs / self._graph.file, threads)
        self._cache = Cache(bundle.manifest.cache(role), self._plan.batch, self._plan.buckets)
        self.lengths = self._cache.lengths
        self.seconds = 0.0
        self._bindings: dict[tuple[int, int], tuple[Binding, Array]] = {}
        self._io: dict[tuple[int, int, int], Any] = {}
        self._key = (0, 0)
        inputs = [spec.name for spec in self._graph.inputs]
        outputs = [spec.name for spec in self._graph.outputs]
        check_names(self._session, self._graph.file, inputs, outputs)

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
        io = self._io_binding((*self._key, self._cache.bucket))
        self.seconds += run_bound(self._session, io, self._graph.file)

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        self._cache.append(row, self._bindings[self._key][1], nodes)

    def truncate(self, row: int, length: int) -> None:
        self._cache.truncate(row, length)

    def cache_rows(self, row: int) -> Array:
        return self._cache.rows(row)

    def _allocate(self, count: int, logit_rows: int) -> tuple[Binding, Array]:
        sizes = {"batch": self._plan.batch, _COUNT[self._graph.role]: count, "rows": logit_rows}
        inputs = allocate(self._graph.inputs, sizes)
        outputs = allocate(self._graph.outputs, sizes)
        layers, two, batch, heads, _, size = self._cache.view.shape
        rows = np.zeros((layers, two, batch, heads, count, size), np.float32)
        return Binding(count, inputs, outputs), rows

    def _io_binding(self, key: tuple[int, int, int]) -> Any:
        if key not in self._io:
            binding, rows = self._bindings[key[:2]]
            inputs = {**binding.inputs, **per_layer("past", self._cache.view)}
            outputs = {**binding.outputs, **per_layer("new", rows)}
            self._io[key] = bind(self._session, inputs, outputs)
        return self._io[key]
