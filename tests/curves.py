"""Cost curves made up for tests: nothing here is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pspec.runtime.calibration import Curve, Device, DraftCost, HostCost, Timing, VerifyCost

DEVICE = Device("Test CPU", 4, 2, "onnxruntime", "1.0")


def made_up_curve(
    verify: Callable[[int, int], float],
    *,
    lengths: Sequence[int] = (1, 90),
    nodes: Sequence[int] = (1, 2, 4, 8),
    draft_ms: float | None = None,
    host: dict[str, float] | None = None,
    device: Device = DEVICE,
    export: str = "",
) -> Curve:
    """A curve in which ``verify`` tells the milliseconds of a length and a number of nodes."""
    bucket = lengths[-1] + 10
    return Curve(
        device=device,
        export=export,
        date="2026-01-01",
        repeats=1,
        verify=tuple(
            VerifyCost(count, bucket, length, exact(verify(length, count)))
            for length in lengths
            for count in nodes
        ),
        draft=()
        if draft_ms is None
        else tuple(DraftCost(bucket, length, exact(draft_ms)) for length in lengths),
        host=tuple(HostCost(name, exact(ms)) for name, ms in (host or {"off": 0.0}).items()),
    )


def exact(ms: float) -> Timing:
    """A time without spread."""
    return Timing(ms, ms, ms)
