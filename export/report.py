"""The parity report in the forms people look at: a table, a picture, and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pspec.export.parity import ParityRow
from pspec.export.precision import PrecisionReport
from pspec.files import write_file
from pspec.runtime.compare import TOLERANCE


def parity_files(rows: Sequence[ParityRow], folder: Path) -> None:
    """Write ``parity.json``, ``parity.md`` and ``parity.svg``."""
    folder.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(list(rows)), indent=1)
    write_file(folder / "parity.json", text + b"\n")
    write_file(folder / "parity.md", parity_table(rows).encode())
    write_file(folder / "parity.svg", parity_picture(rows).encode())


def precision_files(report: PrecisionReport, folder: Path) -> None:
    """Write ``precision.json``, ``precision.md`` and ``precision.svg``."""
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    write_file(folder / "precision.json", text + b"\n")
    write_file(folder / "precision.md", precision_table(report).encode())
    bars = [(layer.name, layer.error) for layer in report.layers]
    title = "change of each layer's output on text, root mean square, 0 to the largest"
    write_file(folder / "precision.svg", picture(title, bars).encode())


def precision_table(report: PrecisionReport) -> str:
    """Markdown, the most sensitive layers first."""
    lines = [
        f"{report.precision} against fp32 on {report.tokens} tokens the target wrote itself:",
        f"KL {report.kl:.4f} nats, most likely token equal {report.top1:.1%}; quantised weights",
        f"{report.weight_bytes / 1e6:.1f} MB, in fp32 {report.float_bytes / 1e6:.1f} MB.",
        "",
        "| weight | change of its layer's output | bytes |",
        "|---|---:|---:|",
    ]
    lines += [f"| {each.name} | {each.error:.2%} | {each.bytes} |" for each in report.layers]
    return "\n".join(lines) + "\n"


def parity_table(rows: Sequence[ParityRow]) -> str:
    """Markdown."""
    lines = [
        f"Exported graphs in ONNX Runtime against PyTorch, fp32; tolerance {TOLERANCE:g}.",
        "",
        "| graph | inputs | largest difference | tokens equal | near-ties | |",
        "|---|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {row.graph} | {row.inputs} | {row.error:.1e} | {row.agree:.1%} | {row.near_ties} | "
        f"{'ok' if row.passed else 'FAILED'} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def parity_picture(rows: Sequence[ParityRow]) -> str:
    """One bar a row on a logarithmic scale from 1e-8 to 1, the tolerance as a line (SVG)."""

    def place(error: float) -> float:
        return min(max((math.log10(max(error, 1e-8)) + 8) / 8, 0.0), 1.0)

    bars = [(f"{row.graph} {row.inputs}", place(row.error)) for row in rows]
    good = [row.passed for row in rows]
    title = "difference from PyTorch, 1e-8 to 1 (log); line: tolerance"
    return picture(title, bars, scale=1.0, good=good, line=place(TOLERANCE))


def picture(
    title: str,
    bars: Sequence[tuple[str, float]],
    *,
    scale: float | None = None,
    good: Sequence[bool] | None = None,
    line: float | None = None,
) -> str:
    """A bar chart (SVG); ``scale`` is the value of a whole bar, by default the largest."""
    height, left, width = 18, 260, 480
    total = height * (len(bars) + 2)
    whole = scale or max((value for _, value in bars), default=1.0) or 1.0
    parts = [
        f'<text x="{left - 8}" y="{height * i + 30}" text-anchor="end">{label}</text>'
        f'<rect x="{left}" y="{height * i + 20}" width="{width * value / whole:.1f}" height="12" '
        f'fill="{"#2a7" if good is None or good[i] else "#c33"}"/>'
        for i, (label, value) in enumerate(bars)
    ]
    if line is not None:
        x = left + width * line / whole
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{total}" stroke="#888"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{total}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="12">{title}</text>' + "".join(parts) + "</svg>\n"
    )
