"""What calls cost on a device: read from a bundle's ``reports/calibration.json``.

``pspec calibrate`` measures and writes it after the export, so the manifest knows nothing of it.
One entry a device: a curve says nothing about another machine, engine or number of threads.
"""

from __future__ import annotations

import os
import platform
import sys
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pspec.errors import BundleError, RequestError
from pspec.runtime.bundle import Bundle
from pspec.runtime.engines import choose_engine, engine_version
from pspec.runtime.manifest import Strict

CALIBRATION_FILE = "reports/calibration.json"
CALIBRATION_VERSION = 1

Milliseconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Length = Annotated[int, Meta(ge=0)]


class Device(Strict, frozen=True):
    """What a curve is true of."""

    cpu: str
    cores: Count
    threads: Count | None
    engine: str
    engine_version: str

    @property
    def key(self) -> str:
        """The device in words; its name in the file."""
        threads = "default threads" if self.threads is None else f"{self.threads} threads"
        return f"{self.cpu}, {self.cores} cores, {threads}, {self.engine} {self.engine_version}"


class Timing(Strict, frozen=True):
    """Milliseconds: the median of the repetitions and the quartiles around it."""

    ms: Milliseconds
    low: Milliseconds
    high: Milliseconds


class VerifyCost(Strict, frozen=True):
    """A target call over ``nodes`` nodes behind ``length`` cached rows, in the cache ``bucket``."""

    nodes: Count
    bucket: Count
    length: Length
    time: Timing


class DraftCost(Strict, frozen=True):
    """The drafter call of a round behind ``length`` cached rows."""

    bucket: Count
    length: Length
    time: Timing


class HostCost(Strict, frozen=True):
    """What a round costs beside its engine calls; ``draft`` is ``off``, ``lookup``, ``bundle``."""

    draft: str
    time: Timing


class Curve(Strict, frozen=True):
    """One device's measurements.

    Attributes:
        device: where.
        export: checksum of the manifest: a curve is true of one export.
        date: day of the measurement, ISO 8601.
        repeats: sweeps over all cases.
        verify: one entry for each of the lengths and numbers of nodes.
        draft: one entry for each of some lengths; empty without a drafter.
        host: one entry for each way of drafting, ``off`` (a plain round) always among them.
    """

    device: Device
    export: str
    date: str
    repeats: Count
    verify: tuple[VerifyCost, ...]
    draft: tuple[DraftCost, ...]
    host: tuple[HostCost, ...]

    def __post_init__(self) -> None:
        places = sorted((cost.length, cost.nodes) for cost in self.verify)
        if not places or places != [*product(self.lengths, self.nodes)]:
            raise ValueError("verify has gaps: expected every number of nodes at every length")
        if any(cost.time.ms == 0 for cost in self.verify):
            raise ValueError("verify holds a call that takes no time")
        if "off" not in {cost.draft for cost in self.host}:
            raise ValueError("host has no entry for draft off")

    @property
    def lengths(self) -> list[int]:
        """Cached rows that were measured, ascending."""
        return sorted({cost.length for cost in self.verify})

    @property
    def nodes(self) -> list[int]:
        """Numbers of nodes that were measured, ascending."""
        return sorted({cost.nodes for cost in self.verify})


class Calibration(Strict, frozen=True):
    """The whole file: curves by :attr:`Device.key`."""

    schema_version: int
    devices: dict[str, Curve]


def this_device(engine: str, threads: int | None) -> Device:
    """The device that a request on ``engine`` with ``threads`` runs on."""
    return Device(_cpu_name(), _cores(), threads, engine, engine_version(engine))


def read_calibration(folder: Path) -> Calibration:
    """A bundle's curves; none where it was never calibrated.

    Raises:
        BundleError: for a file that is damaged or of another version.
    """
    path = folder / CALIBRATION_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        return Calibration(CALIBRATION_VERSION, {})
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BundleError(
            f"{path} is damaged ({error}): delete it and run pspec calibrate {folder}"
        ) from error
    if found.schema_version != CALIBRATION_VERSION:
        raise BundleError(
            f"{path} has schema version {found.schema_version}, this release reads "
            f"{CALIBRATION_VERSION}: delete it and run pspec calibrate {folder}"
        )
    return found


def find_curve(bundle: Bundle, engine: str, threads: int | None) -> Curve:
    """The curve of this device.

    Raises:
        RequestError: when there is none of this device and export, with the command that makes it.
        BundleError: for a damaged file.
    """
    device = this_device(engine, threads)
    curve = read_calibration(bundle.folder).devices.get(device.key)
    if curve is not None and curve.export == bundle.manifest.checksum:
        return curve
    fault = "no calibration for" if curve is None else "the calibration is of another export on"
    options = "" if engine == choose_engine("auto")[0] else f" --engine {engine}"
    options += "" if threads is None else f" --threads {threads}"
    raise RequestError(
        f"nodes auto: {fault} this device ({device.key}): run pspec calibrate "
        f"{bundle.folder}{options}, or use a number"
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _cpu_name() -> str:
    """The processor, or the board where the processor has no name (ARM)."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return Path("/proc/device-tree/model").read_text(encoding="utf-8").strip("\0 \n")
    except OSError:
        return platform.processor() or platform.machine() or "unknown"
