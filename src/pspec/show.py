"""What the commands print: tables and progress, for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from pspec.doctor import Report
from pspec.progress import Watcher
from pspec.runtime.bundle import open_bundle
from pspec.runtime.manifest import Manifest, ShapePlan

if TYPE_CHECKING:
    from pspec.export.request import ExportRequest
    from pspec.models.checkpoint import LoadedTarget
    from pspec.models.drafter import Drafter
    from pspec.runtime.calibration import Curve
    from pspec.runtime.decode import Stats

console = Console(markup=False)  # names may hold brackets


class Progress(Watcher):
    """An export's watcher: one bar a stage on a terminal, one line a stage elsewhere."""

    def __init__(self) -> None:
        self._bars = Bars(
            TextColumn("{task.description:<8} {task.fields[detail]}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True, markup=False),
            disable=not console.is_terminal,
        )
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, name: str, detail: str) -> None:
        """A stage begins."""
        if self._bars.disable:
            console.print(f"{name}: {detail}", highlight=False)
        self._task = self._bars.add_task(name, detail=detail, total=None)

    def advance(self, done: int, total: int) -> None:
        """Work inside the stage went on."""
        self._bars.update(self._task, completed=done, total=total)

    def note(self, text: str) -> None:
        """Something worth a line."""
        (console if self._bars.disable else self._bars.console).print(text, highlight=False)


def tokens_per_second(stats: Stats) -> float:
    """Committed tokens over the time of the rounds, prefill left out; 0 without a round."""
    seconds = stats.draft_seconds + stats.verify_seconds + stats.host_seconds
    return stats.committed / seconds if seconds else 0.0


def show_plan(
    request: ExportRequest, target: LoadedTarget, drafter: Drafter | None, plan: ShapePlan
) -> None:
    """What an export would make."""
    from pspec.export.describe import target_name
    from pspec.export.plan import drafter_sizes, target_sizes

    sizes = sum(tensor.numel() * 4 for tensor in target.decoder.state_dict().values())
    own = sum(tensor.numel() * 4 for tensor in drafter.state_dict().values()) if drafter else 0
    graphs = len(target_sizes(plan)) + 1
    graphs += len(drafter_sizes(plan)) + 1 if drafter else 0
    _facts(
        f"{request.output} (dry run: nothing is written)",
        {
            "target": f"{target_name(target)}, {target.config.family}",
            "layers": target.config.num_layers,
            "drafter": f"{request.drafter}, {drafter.config.slots} slots" if drafter else "none",
            "precision": request.precision,
            "platform": request.platform,
            "weights": f"{(sizes + own) / 1e6:.0f} MB",
            "graphs": f"{graphs}",
            **_plan_facts(plan),
        },
    )


def show_parity(folder: Path) -> None:
    """The parity table of a finished export."""
    rows = json.loads((folder / "reports" / "parity.json").read_bytes())
    table = Table(title="exported graphs against PyTorch, fp32: largest difference")
    # Short enough, with the longest graph's name, for a terminal of 80 columns.
    for title in ("graph", "inputs", "difference", "tokens equal", "near-ties"):
        justify: JustifyMethod = "left" if title in ("graph", "inputs") else "right"
        table.add_column(title, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(
            row["graph"].removesuffix(".onnx"),
            row["inputs"],
            f"{row['error']:.1e}",
            f"{row['agree']:.1%}",
            str(row["near_ties"]),
        )
    console.print(table)


def show_calibration(curve: Curve) -> None:
    """What calls cost on a device."""
    from pspec.calibrate.store import table_rows, widest_spread

    console.print(curve.device.key, soft_wrap=True, highlight=False)
    table = Table(title="median ms by cached rows/smallest bucket for them", title_justify="left")
    header, *rows = table_rows(curve, lambda time: f"{time.ms:.2f}")
    for place, title in enumerate(header):
        table.add_column(title, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    spread = f"quartiles are at most {widest_spread(curve):.0%} of the median apart"
    console.print(f"{curve.repeats} sweeps; {spread}", soft_wrap=True, highlight=False)


def show_bundle(folder: Path, as_json: bool) -> None:
    """A bundle's manifest."""
    manifest = open_bundle(folder).manifest
    if as_json:
        console.out(msgspec.json.encode(manifest).decode(), highlight=False)
        return
    _facts(str(folder), _bundle_facts(manifest))
    table = Table(title="graphs")
    for title in ("file", "inputs", "outputs"):
        table.add_column(title)
    for graph in manifest.graphs:
        table.add_row(graph.file, str(len(graph.inputs)), str(len(graph.outputs)))
    console.print(table)


def show_drafter(folder: Path, as_json: bool) -> None:
    """A drafter directory, every tensor read and checked."""
    from pspec.models.drafter_file import read_drafter

    drafter = read_drafter(folder)
    tensors = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    config = msgspec.to_builtins(drafter.config)
    if as_json:
        console.out(json.dumps({"config": config, "tensors": tensors}), highlight=False)
        return
    count = sum(tensor.numel() for tensor in drafter.state_dict().values())
    _facts(f"{folder}: {count:,} parameters", _flat(config))
    table = Table(title="tensors as graphs use them, weights [in, out]", title_justify="left")
    table.add_column("name", overflow="fold")
    table.add_column("shape", justify="right")
    for name, shape in tensors.items():
        table.add_row(name, " x ".join(map(str, shape)))
    console.print(table)


def show_report(report: Report) -> None:
    """What ``doctor`` found."""
    table = Table()
    for title in ("area", "name", "state", "found"):
        table.add_column(title, overflow="fold")
    colours = {"ok": "green", "warn": "yellow", "missing": "dim", "fail": "red"}
    fixes: dict[str, list[str]] = {}
    for row in report.rows:
        cells = (row.area, row.name, row.state, row.found)
        table.add_row(*map(Text, cells), style=colours[row.state])
        if row.fix:
            fixes.setdefault(row.fix, []).append(row.name)
    console.print(table)
    for fix, names in fixes.items():  # whole lines, to be copied
        console.print(f"for {', '.join(names)}:\n  {fix}", soft_wrap=True, highlight=False)
    console.print(_verdict(report), soft_wrap=True, highlight=False)


def _verdict(report: Report) -> str:
    """One line on what the machine can do."""
    parts = [
        "exports bundles" if report.exports else "cannot export",
        f"builds for {', '.join(report.builds)}" if report.builds else "builds no engine",
        f"runs bundles on {', '.join(report.runs)}" if report.runs else "cannot run bundles",
    ]
    damaged = [row.name for row in report.rows if row.state == "fail"]
    fault = f"; mend first: {', '.join(damaged)}" if damaged else ""
    return f"this machine {'; '.join(parts)}{fault}"


def _bundle_facts(manifest: Manifest) -> dict[str, object]:
    target, drafter = manifest.target, manifest.drafter
    weights = int(manifest.provenance.get("weight_bytes", "0"))
    return {
        "target": f"{manifest.name}, {target.family}, vocabulary {target.vocab_size}",
        "drafter": f"{drafter.slots} slots, {drafter.candidates} candidates" if drafter else "none",
        "features": target.features,
        "precision": manifest.precision,
        "platform": manifest.platform,
        "weights": f"{weights / 1e6:.0f} MB, {len(manifest.tensors)} tensors",
        **_plan_facts(manifest.plan),
        **manifest.provenance,
    }


def _plan_facts(plan: ShapePlan) -> dict[str, object]:
    return {
        "batch": plan.batch,
        "nodes": plan.nodes,
        "chunk": plan.chunk,
        "cache buckets": plan.buckets,
    }


def _facts(title: str, facts: Mapping[str, object]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, _text(value))
    console.print(table)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """The fields of nested objects under dotted names; those that are not set are left out."""
    fields: dict[str, object] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            fields |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            fields[prefix + name] = value
    return fields


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
