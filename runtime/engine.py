"""What the decoding loop asks of an engine: run a shape, and keep the accepted rows.

An engine owns its cache. A caller fills the inputs of a :class:`Binding`, runs it, reads the
outputs, and says which of the new rows to keep; it never sees a cache tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Binding:
    """Buffers of one static shape, allocated once and used every round.

    Attributes:
        count: new rows: nodes of the target, accepted pairs of a drafter.
        inputs: arrays to fill, by graph input name (caches excluded).
        outputs: arrays to read after a run, by graph output name (new rows excluded).
    """

    count: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


class Engine(Protocol):
    """One model on one device with its resident cache."""

    name: str
    lengths: NDArray[np.int32]
    """``[B]``: rows of the cache that count. Read-only for callers."""
    seconds: float
    """Time spent inside the engine since it was opened."""

    def fit(self, count: int) -> int:
        """The smallest supported shape with at least ``count`` new rows."""
        ...

    def bind(self, count: int, logit_rows: int = 0) -> Binding:
        """Buffers for ``count`` new rows; a target also takes the number of logit rows."""
        ...

    def run(self, binding: Binding, adds: int) -> None:
        """Run, after making room for the ``adds`` rows that may be committed."""
        ...

    def commit(self, row: int, nodes: Sequence[int]) -> None:
        """Append the new rows of these nodes of the last run to batch row ``row``, in order."""
        ...

    def truncate(self, row: int, length: int) -> None:
        """Forget the rows from ``length`` on; 0 starts a new sequence."""
        ...

    def cache_rows(self, row: int) -> Array:
        """A copy of the rows that count, ``[layers, 2, heads, length, size]``, for checks."""
        ...
