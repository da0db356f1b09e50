"""Cost curves as a picture. Needs matplotlib, which only the extra ``plot`` brings."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pspec.runtime.calibration import Curve


def draw_curves(curves: Sequence[Curve]) -> bytes:
    """A PNG with one panel a device: milliseconds of a verify call by nodes, a line a length."""
    figure = Figure(figsize=(7, 4.5 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(curves), squeeze=False)
    for curve, axes in zip(curves, panels[:, 0], strict=True):
        _draw(curve, axes)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def _draw(curve: Curve, axes: Axes) -> None:
    for length in curve.lengths:
        costs = [cost for cost in curve.verify if cost.length == length]  # by nodes, as stored
        below = [cost.time.ms - cost.time.low for cost in costs]
        above = [cost.time.high - cost.time.ms for cost in costs]
        axes.errorbar(
            [cost.nodes for cost in costs],
            [cost.time.ms for cost in costs],
            yerr=(below, above),
            marker="o",
            markersize=4,
            capsize=2,
            label=f"verify, {length} cached of {costs[0].bucket}",
        )
    if curve.draft:
        drafts = sorted(cost.time.ms for cost in curve.draft)
        axes.axhspan(drafts[0], drafts[-1], color="tab:gray", alpha=0.4, label="draft call")
    axes.set_xscale("log", base=2)
    axes.set_xticks(curve.nodes, [str(count) for count in curve.nodes])
    axes.set(xlabel="nodes of a call", ylabel="milliseconds", ylim=(0, None))
    axes.set_title(curve.device.key, fontsize="small", wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
