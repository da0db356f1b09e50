"""Curves of devices, kept in the bundle they were measured on: JSON, a table, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from pspec.calibrate.curve import measure_curve
from pspec.files import disk_errors, only_writer, write_file
from pspec.progress import Watcher
from pspec.runtime.bundle import check_hashes, open_bundle
from pspec.runtime.calibration import (
    CALIBRATION_FILE,
    CALIBRATION_VERSION,
    Calibration,
    Curve,
    Timing,
    read_calibration,
)

_EXPLAINED = "Milliseconds, median [quartiles], by cached rows/smallest bucket for them."
NO_PICTURE = "matplotlib is not installed, so no plot: pip install 'pspec-toolkit[plot]'"


def calibrate(
    folder: Path, engine: str, threads: int | None, repeats: int, watcher: Watcher
) -> tuple[Curve, list[Path]]:
    """Measure a bundle on this device and keep the curve in it.

    Returns:
        The curve, and the files that hold it; without matplotlib there is no picture among them.

    Raises:
        PspecError: for a damaged bundle or calibration, a bundle that cannot be measured, an engine
            that cannot run here, a folder that cannot be written, another calibration under way.
    """
    bundle = open_bundle(folder)
    check_hashes(bundle)
    read_calibration(folder)  # a damaged file is better found before the measuring
    reports = (folder / CALIBRATION_FILE).parent
    with disk_errors(reports), only_writer(reports):
        curve = measure_curve(bundle, engine, threads, repeats, watcher)
        return curve, save_curve(folder, curve)


def save_curve(folder: Path, curve: Curve) -> list[Path]:
    """Put a curve in the place of its device's last one; returns the files written."""
    kept = read_calibration(folder).devices
    devices = {key: old for key, old in kept.items() if old.export == curve.export}
    devices[curve.device.key] = curve
    path = folder / CALIBRATION_FILE
    data = msgspec.json.encode(Calibration(CALIBRATION_VERSION, devices))
    write_file(path, msgspec.json.format(data, indent=1) + b"\n")
    curves = list(devices.values())
    table, picture = path.with_suffix(".md"), path.with_suffix(".png")
    write_file(table, calibration_text(curves).encode())
    try:
        from pspec.calibrate.picture import draw_curves
    except ModuleNotFoundError:
        picture.unlink(missing_ok=True)  # it would show other curves
        return [path, table]
    write_file(picture, draw_curves(curves))
    return [path, table, picture]


def calibration_text(curves: Sequence[Curve]) -> str:
    """Markdown, a section a device."""
    lines = ["# Cost of a round, by `pspec calibrate`", "", _EXPLAINED]
    for curve in curves:
        lines += ["", f"## {curve.device.key}", "", f"{curve.date}, {curve.repeats} sweeps.", ""]
        header, *rows = table_rows(curve, with_quartiles)
        lines += [_line(header), _line(["---", *["---:"] * (len(header) - 1)])]
        lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def table_rows(curve: Curve, cell: Callable[[Timing], str]) -> Iterator[list[str]]:
    """The curve as a table with its header: a row a case, a column a length of the cache."""
    buckets = {cost.length: cost.bucket for cost in curve.verify}
    yield ["call", *(f"{length}/{buckets[length]}" for length in curve.lengths)]
    verify = {(cost.nodes, cost.length): cost.time for cost in curve.verify}
    for nodes in curve.nodes:
        yield [f"verify {nodes}", *(cell(verify[nodes, length]) for length in curve.lengths)]
    draft = {cost.length: cost.time for cost in curve.draft}
    if draft:
        yield ["draft", *(cell(draft[length]) for length in curve.lengths)]
    for cost in curve.host:
        rest = [""] * (len(curve.lengths) - 1)
        yield [f"host, {cost.draft}", cell(cost.time), *rest]


def widest_spread(curve: Curve) -> float:
    """The largest distance between the quartiles of a call, over its median."""
    times = [*(cost.time for cost in curve.verify), *(cost.time for cost in curve.draft)]
    return max((time.high - time.low) / time.ms for time in times if time.ms)


def with_quartiles(time: Timing) -> str:
    """``median [first quartile, third quartile]``."""
    return f"{time.ms:.2f} [{time.low:.2f}, {time.high:.2f}]"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
