"""Milliseconds of a round by tree size and cache length, between the points that were measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pspec.runtime.calibration import Curve


class RoundCost:
    """What a round costs: draft call, verify call and host, for each of some tree sizes.

    A round of one node is a plain step: it pays no draft call.
    """

    def __init__(self, curve: Curve, draft: str, sizes: Sequence[int]) -> None:
        """Prepare the table.

        Args:
            curve: the device's measurements.
            draft: where drafted tokens come from: ``bundle`` pays the drafter's call.
            sizes: tree sizes of interest, ascending.
        """
        host = {cost.draft: cost.time.ms for cost in curve.host}
        self.pays_for_drafts = draft == "bundle"
        calls = _draft_ms(curve) if self.pays_for_drafts else np.zeros(len(curve.lengths))
        table = _verify_ms(curve, sizes)  # [lengths, sizes]
        table += [[host["off"] if size == 1 else host.get(draft, host["off"]) for size in sizes]]
        table[:, np.asarray(sizes) > 1] += calls[:, None]
        self._lengths = curve.lengths
        self._table: list[list[float]] = table.tolist()

    def at(self, length: int) -> list[float]:
        """Milliseconds by tree size behind ``length`` cached rows; linear between two points."""
        above = bisect_right(self._lengths, length)
        if above == 0 or above == len(self._lengths):
            return self._table[min(above, len(self._lengths) - 1)]
        low, high = self._lengths[above - 1 : above + 1]
        share = (length - low) / (high - low)
        pairs = zip(self._table[above - 1], self._table[above], strict=True)
        return [under + share * (over - under) for under, over in pairs]


def ascending(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never descends (least squares): noise must not pay for nodes."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, weight = blocks.pop()
            mean, count = (mean * count + before * weight) / (count + weight), count + weight
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def _verify_ms(curve: Curve, sizes: Sequence[int]) -> NDArray[np.float64]:
    """``[lengths, sizes]``."""
    measured = {(cost.length, cost.nodes): cost.time.ms for cost in curve.verify}
    rows = ([measured[length, nodes] for nodes in curve.nodes] for length in curve.lengths)
    return np.array([np.interp(sizes, curve.nodes, ascending(row)) for row in rows])


def _draft_ms(curve: Curve) -> NDArray[np.float64]:
    """``[lengths]``; a call that was not measured costs nothing."""
    points = sorted((cost.length, cost.time.ms) for cost in curve.draft) or [(0, 0.0)]
    lengths, ms = [point[0] for point in points], [point[1] for point in points]
    found: NDArray[np.float64] = np.interp(np.asarray(curve.lengths), lengths, ms)
    return found
