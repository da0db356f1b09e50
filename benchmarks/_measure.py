"""What every benchmark needs: medians with spread, tables, and results that say what they are.

Results name the machine's kind and the versions, never a path of it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from pspec.files import write_file

_PACKAGES = ("pspec-toolkit", "numpy", "onnxruntime", "torch", "transformers", "onnx", "onnxscript")


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 2) -> str:
        """For a table: ``median [first quartile, third quartile]``."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def spread(values: Iterable[float]) -> Spread:
    """Median and quartiles of at least one value."""
    listed = list(values)
    low, median, high = np.percentile(listed, (25, 50, 75)).tolist()
    return Spread(median, low, high, len(listed))


def percentile(values: Iterable[float], percent: float) -> float:
    """One percentile, interpolated."""
    return float(np.percentile(list(values), percent))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns whose cells are all numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells under {len(header)} titles")
    right = [
        bool(cells) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in cells)
        for i in range(len(header))
    ]
    lines = [list(header), ["---:" if number else "---" for number in right], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions() -> dict[str, Any]:
    """When, on what, with what: whatever a figure depends on but the script does not set."""
    found = {name: _version(name) for name in _PACKAGES}
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: number for name, number in found.items() if number},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def save(folder: Path, name: str, data: Mapping[str, Any], report: str) -> None:
    """Write ``NAME.json`` and ``NAME.md``, and print the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, ensure_ascii=False, default=_json_value)
    write_file(folder / f"{name}.json", text.encode() + b"\n")
    write_file(folder / f"{name}.md", report.encode() + b"\n")
    print(f"\n{report}\n\nwritten: {name}.json and {name}.md in {folder}")


def footer(conditions: Mapping[str, Any]) -> str:
    """The line under a report that says where its numbers come from."""
    versions = ", ".join(f"{name} {number}" for name, number in conditions["versions"].items())
    return (
        f"{conditions['cpu']}, {conditions['cores']} cores, load {conditions['load_before']} "
        f"before the run, {conditions['date']}; Python {conditions['python']}, {versions}."
    )


def _json_value(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not for JSON")
