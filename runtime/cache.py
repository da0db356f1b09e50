"""The key/value arena: one allocation for all layers, laid out anew when the context outgrows it.

``[layers, 2, B, heads, S, D]`` with S the bucket in use. Cost follows the bucket, not the longest
context, and the arena never moves: a larger bucket is a longer prefix of the same allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pspec.errors import RequestError
from pspec.runtime.engine import Array
from pspec.runtime.manifest import CacheSpec


class Cache:
    """Rows of every layer in host memory."""

    def __init__(self, spec: CacheSpec, batch: int, buckets: Sequence[int]) -> None:
        self.buckets = tuple(buckets)
        self.lengths = np.zeros(batch, np.int32)
        self._shape = (spec.layers, 2, batch, spec.heads)
        self._size = spec.size
        # Zero-filled: a weight of 0 times a stray NaN would be NaN.
        self._arena = np.zeros(int(np.prod(self._shape)) * buckets[-1] * spec.size, np.float32)
        self.view = self._layout(buckets[0])

    @property
    def bucket(self) -> int:
        """Slots S of the present layout."""
        return int(self.view.shape[4])

    def reserve(self, adds: int) -> None:
        """Make room for ``adds`` more rows; moving up a bucket re-lays the rows once.

        Raises:
            RequestError: when the largest bucket is too small.
        """
        needed = int(self.lengths.max()) + adds
        if needed <= self.bucket:
            return
        bucket = next((size for size in self.buckets if size >= needed), None)
        if bucket is None:
            raise RequestError(f"{needed} cache rows do not fit the context of {self.buckets[-1]}")
        used = int(self.lengths.max())
        rows = self.view[..., :used, :].copy()
        self.view = self._layout(bucket)
        self.view[..., :used, :] = rows

    def append(self, row: int, new_rows: Array, nodes: Sequence[int]) -> None:
        """Copy ``new_rows[layers, 2, B, heads, N, D]`` of ``nodes`` behind the rows of ``row``."""
        start = int(self.lengths[row])
        stop = start + len(nodes)
        first = nodes[0] if nodes else 0
        if list(nodes) == list(range(first, first + len(nodes))):  # a chain: one strided copy
            kept = new_rows[:, :, row, :, first : first + len(nodes)]
        else:
            kept = new_rows[:, :, row].take(nodes, axis=3)
        self.view[:, :, row, :, start:stop] = kept
        self.lengths[row] = stop

    def truncate(self, row: int, length: int) -> None:
        """Keep the first ``length`` rows; an empty cache returns to the smallest bucket."""
        self.lengths[row] = min(length, int(self.lengths[row]))
        if not self.lengths.any():
            self.view = self._layout(self.buckets[0])

    def rows(self, row: int) -> Array:
        """A copy of what counts, ``[layers, 2, heads, length, D]``."""
        rows: Array = self.view[:, :, row, :, : self.lengths[row]].copy()
        return rows

    def _layout(self, bucket: int) -> Array:
        shape = (*self._shape, bucket, self._size)
        return self._arena[: int(np.prod(shape))].reshape(shape)
