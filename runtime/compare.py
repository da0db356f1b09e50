"""How far two runs of one graph may lie apart: the rule of the export and of ``pspec verify``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-3
"""Largest absolute difference allowed in fp32, over the larger of 1 and the values' scale.

Random caches drive activations far beyond those of text: 2e-4 was seen on a 30-layer target. Token
ids may differ where the reference's own scores for them are closer than this.
"""

SCORES = {"next_token": "logits", "draft_ids": "draft_logprobs"}
"""What decides the token ids of an output."""

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare_outputs` found.

    Attributes:
        error: largest difference of float outputs, over the larger of 1 and their scale; infinite
            where a value is not finite or an output has another shape or type.
        agree: share of integer outputs (token ids) that are equal.
        near_ties: unequal ids that the reference itself can hardly tell apart.
        faults: a phrase for each output that is not what it should be.
    """

    error: float
    agree: float
    near_ties: int
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults


def compare_outputs(have: Outputs, want: Outputs, tolerance: float = TOLERANCE) -> Comparison:
    """Compare a run with the reference's outputs ``want``, all of which ``have`` must hold."""
    error, equal, total, near, faults = 0.0, 0, 0, 0, []
    # Floats first: ids that differ are mostly their consequence.
    for name, wanted in sorted(want.items(), key=lambda item: item[1].dtype.kind != "f"):
        got = have.get(name)
        if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
            error = float("inf")
            faults.append(f"{name} has another shape or type")
        elif wanted.dtype.kind == "f":
            apart = difference(got, wanted)
            error = max(error, apart)
            if apart > tolerance:
                faults.append(f"{name} differs by {apart:.1e}")
        else:
            same, ties = int((got == wanted).sum()), _near_ties(name, got, wanted, want, tolerance)
            equal, total, near = equal + same, total + wanted.size, near + ties
            if same + ties != wanted.size:
                faults.append(f"{name} differs in {wanted.size - same} of {wanted.size} ids")
    return Comparison(error, equal / total if total else 1.0, near, tuple(faults))


def difference(have: NDArray[Any], want: NDArray[Any]) -> float:
    """Infinite where either is not finite: a NaN compares as neither small nor large."""
    if not (np.isfinite(have).all() and np.isfinite(want).all()):
        return float("inf")
    scale = max(1.0, float(np.abs(want).max(initial=0.0)))
    return float(np.abs(have - want).max(initial=0.0)) / scale


def _near_ties(
    name: str,
    have: NDArray[Any],
    want: NDArray[Any],
    reference: Outputs,
    tolerance: float,
) -> int:
    """How many unequal ids have scores in the reference that are closer than the tolerance."""
    scores = reference.get(SCORES.get(name, ""))
    if scores is None:
        return 0
    gap = _token_gap if name == "next_token" else _candidate_gap
    places = [tuple(place) for place in np.argwhere(have != want)]
    return sum(gap(place, have, want, scores) < tolerance for place in places)


def _token_gap(
    place: tuple[int, ...], have: NDArray[Any], want: NDArray[Any], logits: NDArray[Any]
) -> float:
    """Between the logits of two tokens; infinite for an id outside the vocabulary."""
    row, token = logits[place], have[place]
    return abs(float(row[want[place]] - row[token])) if 0 <= token < row.size else float("inf")


def _candidate_gap(
    place: tuple[int, ...], have: NDArray[Any], want: NDArray[Any], logprobs: NDArray[Any]
) -> float:
    """Between the candidate that stands in a place and the one that belongs there.

    A candidate that the reference does not list is taken for one that ties with its last.
    """
    *slot, rank = place
    row = logprobs[tuple(slot)]
    found = np.flatnonzero(want[tuple(slot)] == have[place])
    return abs(float(row[found[0] if found.size else -1] - row[rank]))
