"""The measured half of ``export.py``: one export in a process of its own, or only its imports.

``_export_child.py export REQUEST REPORT`` takes the fields of an ``ExportRequest``,
``_export_child.py imports MODULES REPORT`` the names that an export had imported, as JSON files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pspec.progress import Watcher

START = time.perf_counter()


def memory(name: str) -> int:
    """Bytes of a field of this process's status, such as ``VmRSS`` or ``VmHWM``."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_peak() -> None:
    """Let ``VmHWM`` start again from the present size."""
    with contextlib.suppress(OSError):  # without the right to, peaks are peaks so far
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


class Stages:
    """Wall time and peak memory of what lies between two calls of :meth:`begin`."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._name, self._start = "imports", START

    def begin(self, name: str) -> None:
        """End the stage before, and start one."""
        self.end()
        self._name, self._start = name, time.perf_counter()
        print(f"  {name}", flush=True)

    def end(self) -> None:
        """End the present stage."""
        seconds = time.perf_counter() - self._start
        self.done.append({"stage": self._name, "seconds": seconds, "peak": memory("VmHWM")})
        reset_peak()


def watcher(stages: Stages) -> Watcher:
    """An export's watcher that tells ``stages``."""
    from pspec.progress import Watcher

    class Reporting(Watcher):
        def stage(self, name: str, detail: str) -> None:
            # The details of these are paths.
            stages.begin(name if name in ("load", "publish") else f"{name}: {detail}")

    return Reporting()


def export(request: dict[str, Any]) -> dict[str, Any]:
    """Export, and say what each stage took."""
    from pspec.export.pipeline import export_bundle
    from pspec.export.request import ExportRequest

    paths = {name: Path(request[name]) for name in ("output", "drafter") if request.get(name)}
    stages = Stages()
    export_bundle(ExportRequest(**request | paths), watcher(stages))
    stages.end()
    return {"stages": stages.done, "modules": sorted(sys.modules)}


def imports(modules: list[str]) -> dict[str, Any]:
    """Import modules by name; those that exist only inside their package are left out."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return {"rss": memory("VmRSS"), "peak": memory("VmHWM")}


def main() -> None:
    """Run what the arguments say and write the report."""
    kind, source, destination = sys.argv[1:]
    given = json.loads(Path(source).read_bytes())
    report = export(given) if kind == "export" else imports(given)
    Path(destination).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
