"""The parity report in the forms people look at: a table, a picture, and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pspec.export.parity import ParityRow
from pspec.files import write_file
from pspec.runtime.compare import TOLERANCE


def parity_files(rows: Sequence[ParityRow], folder: Path) -> None:
    """Write ``parity.json``, ``parity.md`` and ``parity.svg``."""
    folder.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(list(rows)), indent=1)
    write_file(folder / "parity.json", text + b"\n")
    write_file(folder / "parity.md", parity_table(rows).encode())
    write_file(folder / "parity.svg", parity_picture(rows).encode())


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
    height, left, width = 18, 240, 480

    def place(error: float) -> float:
        return left + width * min(max((math.log10(max(error, 1e-8)) + 8) / 8, 0.0), 1.0)

    total = height * (len(rows) + 2)
    bars = [
        f'<text x="{left - 8}" y="{height * i + 30}" text-anchor="end">'
        f"{row.graph} {row.inputs}</text>"
        f'<rect x="{left}" y="{height * i + 20}" width="{place(row.error) - left:.1f}" height="12" '
        f'fill="{"#2a7" if row.passed else "#c33"}"/>'
        for i, row in enumerate(rows)
    ]
    limit = place(TOLERANCE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{total}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="12">difference from PyTorch, 1e-8 to 1 (log); line: tolerance</text>'
        + "".join(bars)
        + f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="16" y2="{total}" stroke="#888"/></svg>\n'
    )
