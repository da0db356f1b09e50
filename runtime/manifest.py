"""``manifest.json``: everything a runtime needs to know about a bundle, and a hash of every file.

Strict both ways: an unknown key, a missing key or a newer schema version is an error.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"

Role = Literal["target", "drafter"]
DType = Literal["float32", "float16", "int32", "bool"]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Refuses what it does not know."""


class TensorSpec(Strict, frozen=True):
    """One graph input or output; a dim is a number, or in the symbolic graph a name."""

    name: str
    shape: tuple[int | str, ...]
    dtype: DType


class GraphSpec(Strict, frozen=True):
    """One ONNX file. ``sizes`` are the numbers its symbolic dims were frozen to."""

    file: str
    role: Role
    sizes: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def is_symbolic(self) -> bool:
        return not self.sizes


class StoredTensor(Strict, frozen=True):
    """Where a tensor lies in ``graphs/weights.data``; equal tensors share an offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class CacheSpec(Strict, frozen=True):
    """Shape of a model's cache: ``[layers, 2, batch, heads, slots, size]``."""

    layers: int
    heads: int
    size: int


class TargetSpec(Strict, frozen=True):
    """The target. ``features`` are HF ``hidden_states`` boundaries, ``last`` the normed state."""

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    cache: CacheSpec
    features: Literal["none", "last"] | tuple[int, ...]
    feature_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class ParallelSpec(Strict, frozen=True):
    """The runtime's view of a parallel drafter; ``config`` is its own file, for the record."""

    slots: int
    candidates: int
    shift: bool
    feature_size: int
    cache: CacheSpec
    config: dict[str, object]


class ShapePlan(Strict, frozen=True):
    """Static shapes of the bundle.

    Attributes:
        batch: rows of every graph.
        nodes: tree nodes of a verify call, node 0 included.
        accepted: rows a drafter call takes (deepest tree + 1).
        chunk: tokens of a prefill call.
        buckets: cache sizes in slots, ascending; the last is the longest context.
    """

    batch: int
    nodes: int
    accepted: int
    chunk: int
    buckets: tuple[int, ...]

    @property
    def max_context(self) -> int:
        return self.buckets[-1]


class FileHash(Strict, frozen=True):
    """Size and hash of a file."""

    bytes: int
    sha256: str


class Manifest(Strict, frozen=True):
    """The whole file. ``checksum`` covers all the rest of it: no other file holds its hash."""

    schema_version: int
    name: str
    platform: str
    precision: str
    target: TargetSpec
    drafter: ParallelSpec | None
    plan: ShapePlan
    graphs: tuple[GraphSpec, ...]
    tensors: tuple[StoredTensor, ...]
    provenance: dict[str, str]
    files: dict[str, FileHash]
    checksum: str = ""

    def symbolic(self, role: Role) -> GraphSpec:
        """The graph that serves every shape of a role."""
        return next(g for g in self.graphs if g.role == role and g.is_symbolic)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models there are graphs of."""
        return ("target",) if self.drafter is None else ("target", "drafter")

    def cache(self, role: Role) -> CacheSpec:
        """Shape of a role's cache."""
        spec = self.target if role == "target" else self.drafter
        assert spec is not None
        return spec.cache
