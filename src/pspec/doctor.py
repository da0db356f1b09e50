"""What this machine can export, build and run, and the command that mends what it cannot.

Nothing here imports a heavy library: versions come from package metadata, devices from the driver,
and the one question that only an import can answer is asked in a child process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

import pspec
from pspec.runtime.engines import ENGINES

Area = Literal["machine", "export", "build", "run"]
State = Literal["ok", "warn", "missing", "fail"]
"""``warn`` works but slowly or untested, ``missing`` is optional, ``fail`` contradicts itself."""

GIB = 1 << 30
NEWEST_PYTHON = (3, 14)
TIGHT_GIB = 2
"""Free memory or disk under this many GiB is worth a warning: a small fp32 bundle needs as much."""

ONNXRUNTIMES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
)
"""Distributions that unpack into one folder, ``onnxruntime``: of two, one has damaged the other."""

RTX_CAPABILITIES = frozenset({"7.5", "8.6", "8.9", "12.0", "12.1"})
"""Compute capabilities in TensorRT-RTX's support matrix: no Jetson and no data-centre GPU."""


class Row(msgspec.Struct, frozen=True):
    """One finding: what was looked for, what was found, and the command that mends it."""

    area: Area
    name: str
    state: State
    found: str
    fix: str = ""


class Report(msgspec.Struct, frozen=True):
    """Every finding, and what follows from them."""

    rows: tuple[Row, ...]
    exports: bool
    """Whether a checkpoint can be turned into a bundle here."""
    builds: tuple[str, ...]
    """Engines whose compiler works here."""
    runs: tuple[str, ...]
    """Engines of this release that can run here."""

    @property
    def failed(self) -> bool:
        """Whether something contradicts itself: the command then exits with status 1."""
        return any(row.state == "fail" for row in self.rows)


@dataclass(frozen=True)
class Library:
    """A Python distribution that an extra brings."""

    area: Area
    name: str
    extra: str
    least: str
    """The oldest release that works; ``pyproject.toml`` says the same."""
    module: str = ""
    """What it imports as, where the metadata may be absent (TensorRT from JetPack)."""
    required: bool = True


LIBRARIES = (
    Library("run", "numpy", "", "2.0"),
    Library("run", "tokenizers", "", "0.21"),
    Library("run", "jinja2", "", "3.1"),
    Library("run", "cuda-bindings", "cuda", "12.6", required=False),
    Library("export", "torch", "export", "2.9"),
    Library("export", "transformers", "export", "5.0"),
    Library("export", "safetensors", "export", "0.4.3"),
    Library("export", "onnx", "build", "1.19"),
    Library("export", "onnx-ir", "build", "1.0"),
    Library("export", "onnxscript", "build", "0.7"),
    Library("export", "gguf", "export", "0.17"),
    Library("export", "threadpoolctl", "export", "3.1"),
    Library("build", "tensorrt-rtx", "rtx", "1.5", "tensorrt_rtx", required=False),
    Library("build", "tensorrt", "tensorrt", "10.3", "tensorrt", required=False),
    Library("build", "polygraphy", "dev", "0.49", required=False),
)


@dataclass(frozen=True)
class Device:
    """A CUDA device as the driver names it."""

    name: str
    capability: str
    memory_gib: float


class Machine:
    """The facts of the machine this runs on; tests put others in their place."""

    system = platform.system()
    arch = platform.machine()
    python = sys.version_info[:3]

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def importable(self, module: str) -> bool:
        """Whether a top-level module can be found, without importing it."""
        return importlib.util.find_spec(module) is not None

    def text(self, path: str) -> str:
        """Text of a system file, empty where there is none."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def evaluate(self, module: str, expression: str) -> tuple[bool, str]:
        """``(True, value)`` of an expression over a module, or ``(False, what went wrong)``."""
        command = [sys.executable, "-c", f"import {module}; print({expression})"]
        try:
            # Not from the current folder: one of the module's name there would be found first.
            done = subprocess.run(
                command, cwd=sys.prefix, capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return False, str(error)
        if done.returncode == 0:
            return True, done.stdout.strip()
        lines = done.stderr.strip().splitlines()
        return False, lines[-1] if lines else f"import ended with status {done.returncode}"

    def devices(self) -> tuple[Device, ...] | None:
        """CUDA devices, or None where there is no driver."""
        try:
            driver = ctypes.CDLL("nvcuda.dll" if self.system == "Windows" else "libcuda.so.1")
        except OSError:
            return None
        return tuple(cuda_devices(driver))

    def usable_cpus(self) -> int:
        """CPUs this process may use."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def free_disk(self) -> int:
        """Free bytes where bundles are written: the current folder."""
        return shutil.disk_usage(Path.cwd()).free


def examine(machine: Machine | None = None) -> Report:
    """Look at everything once; most of its second goes to the children that import an engine."""
    machine = machine or Machine()
    devices = machine.devices()
    rows = [
        *machine_rows(machine, devices),
        *(library_row(machine, library) for library in LIBRARIES if library.area == "run"),
        onnxruntime_row(machine, devices),
        *(library_row(machine, library) for library in LIBRARIES if library.area != "run"),
    ]
    states = {row.name: row.state for row in rows}
    builds, runs = engines(machine, devices, states)
    exports = all(states[library.name] == "ok" for library in LIBRARIES if library.area == "export")
    return Report(rows=tuple(rows), exports=exports, builds=builds, runs=runs)


def engines(
    machine: Machine, devices: Sequence[Device] | None, states: dict[str, State]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Engines whose compiler works here, and engines that this release can run here."""
    builds: list[str] = []
    runs: list[str] = []
    # The TensorRT engines keep their buffers on the device through cuda-bindings.
    capabilities = {device.capability for device in devices or ()}
    if states["cuda-bindings"] != "ok":
        capabilities = set()
    if states["onnxruntime"] in ("ok", "warn"):
        runs.append("onnxruntime")
        if states["onnx"] == states["onnx-ir"] == "ok":
            builds.append("onnxruntime")
    if states["tensorrt"] == "ok":
        builds += ["tensorrt"] if devices else []
        runs += ["tensorrt"] if capabilities else []
    if states["tensorrt-rtx"] == "ok":
        builds.append("tensorrt-rtx")
        runs += ["tensorrt-rtx"] if capabilities & RTX_CAPABILITIES else []
    return tuple(builds), tuple(name for name in runs if name in ENGINES)


def machine_rows(machine: Machine, devices: Sequence[Device] | None) -> Iterator[Row]:
    """Python, system, processor, memory, disk and GPU."""
    yield Row("machine", "pspec", "ok", pspec.__version__)
    yield python_row(machine)
    yield Row("machine", "system", "ok", f"{machine.system} {machine.arch}")
    if l4t := l4t_release(machine.text("/etc/nv_tegra_release")):
        yield Row("machine", "L4T", "ok", l4t)
    yield cpu_row(machine)
    yield memory_row(machine.text("/proc/meminfo"))
    yield disk_row(machine.free_disk())
    yield cuda_row(devices)


def python_row(machine: Machine) -> Row:
    """The interpreter: newer ones than the tested may work."""
    found = ".".join(map(str, machine.python))
    if machine.python[:2] <= NEWEST_PYTHON:
        return Row("machine", "python", "ok", found)
    newest = ".".join(map(str, NEWEST_PYTHON))
    return Row("machine", "python", "warn", f"{found}, not tested", f"use Python 3.10 to {newest}")


def l4t_release(text: str) -> str:
    """``R36.4.3`` of ``# R36 (release), REVISION: 4.3, ...``; empty where it is no Jetson."""
    match = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", text)
    return f"R{match[1]}.{match[2]}" if match else ""


def cpu_row(machine: Machine) -> Row:
    """CPUs, and the vector instructions that int8 and int4 products run on."""
    info = machine.text("/proc/cpuinfo")
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    wanted = ("avx2", "avx_vnni", "avx512_vnni", "asimd", "asimddp", "i8mm")
    found = " ".join([f"{machine.usable_cpus()} CPUs", *(flag for flag in wanted if flag in flags)])
    if flags and not flags & {"avx2", "asimd"}:
        return Row("machine", "cpu", "warn", f"{found}, no AVX2: slow", "use a CPU with AVX2")
    return Row("machine", "cpu", "ok", found)


def memory_row(meminfo: str) -> Row:
    """Total and available memory, in GiB."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.MULTILINE)
    sizes = {key: int(kib) * 1024 for key, kib in lines}
    if not {"MemTotal", "MemAvailable"} <= sizes.keys():
        return Row("machine", "memory", "ok", "not reported by this system")
    free = sizes["MemAvailable"] / GIB
    found = f"{free:.1f} GiB free of {sizes['MemTotal'] / GIB:.1f} GiB"
    if free < TIGHT_GIB:
        return Row("machine", "memory", "warn", found, "close other programs before an export")
    return Row("machine", "memory", "ok", found)


def disk_row(free: int) -> Row:
    """Space for bundles in the current folder."""
    found = f"{free / GIB:.1f} GiB free here"
    if free < TIGHT_GIB * GIB:
        return Row("machine", "disk", "warn", found, "write bundles to a disk with more space")
    return Row("machine", "disk", "ok", found)


def cuda_row(devices: Sequence[Device] | None) -> Row:
    """The GPUs: none is a plain answer, not a fault."""
    if devices is None:
        return Row("machine", "cuda device", "missing", "no NVIDIA driver")
    if not devices:
        return Row("machine", "cuda device", "missing", "a driver, but no device it can use")
    names = (f"{d.name} (sm {d.capability}, {d.memory_gib:.0f} GiB)" for d in devices)
    return Row("machine", "cuda device", "ok", "; ".join(names))


def cuda_devices(driver: Any) -> Iterator[Device]:
    """Devices of a loaded CUDA driver library."""
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return
    for index in range(count.value):
        handle = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(handle), index):
            continue
        name = ctypes.create_string_buffer(128)
        memory = ctypes.c_size_t()
        driver.cuDeviceGetName(name, len(name), handle)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        capability = f"{attribute(driver, 75, handle)}.{attribute(driver, 76, handle)}"
        yield Device(name.value.decode(errors="replace"), capability, memory.value / GIB)


def attribute(driver: Any, number: int, handle: ctypes.c_int) -> int:
    """One CUDdevice attribute: 75 and 76 are the compute capability's two parts."""
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
    return value.value


def library_row(machine: Machine, library: Library) -> Row:
    """Whether a library is installed, loads (where that is asked), and is new enough."""
    version = machine.version(library.name)
    fix = install(machine, library)
    if version is None and not (library.module and machine.importable(library.module)):
        found = "not installed" if library.required else "not installed, optional"
        return Row(library.area, library.name, "missing", found, fix)
    if library.module:
        loads, version = machine.evaluate(library.module, f"{library.module}.__version__")
        if not loads:
            return Row(library.area, library.name, "fail", f"does not load: {version}", fix)
    if release(version or "") < release(library.least):
        found = f"{version}, older than {library.least}"
        return Row(library.area, library.name, "missing", found, fix)
    return Row(library.area, library.name, "ok", version or "")


def onnxruntime_row(machine: Machine, devices: Sequence[Device] | None) -> Row:
    """The default engine: exactly one distribution of it, and the providers it was built with."""
    here = {name: version for name in ONNXRUNTIMES if (version := machine.version(name))}
    extra = "gpu" if devices else "cpu"
    wanted = Library("run", "onnxruntime", extra, "1.23")
    fix = install(machine, wanted)
    if not here:
        return Row("run", "onnxruntime", "missing", "not installed", fix)
    found = ", ".join(f"{name} {version}" for name, version in here.items())
    if len(here) > 1:
        # Removing one of them deletes files of the other, so both go.
        fix = f"{pip()} uninstall -y {' '.join(here)} && {fix}"
        return Row("run", "onnxruntime", "fail", f"{found}: they overwrite each other", fix)
    if release(next(iter(here.values()))) < release(wanted.least):
        return Row("run", "onnxruntime", "missing", f"{found}, older than {wanted.least}", fix)
    expression = "' '.join(onnxruntime.get_available_providers())"
    loads, answer = machine.evaluate("onnxruntime", expression)
    if not loads:
        return Row("run", "onnxruntime", "fail", f"{found} does not load: {answer}", fix)
    providers = answer.replace("ExecutionProvider", "").split()
    found = f"{found} ({', '.join(providers)})"
    if "CUDA" in providers and not devices:
        return Row("run", "onnxruntime", "warn", f"{found}, no CUDA device: runs on the CPU")
    return Row("run", "onnxruntime", "ok", found)


def release(version: str) -> tuple[int, ...]:
    """The release part of a version as numbers: ``2.13.0+cpu`` is ``(2, 13, 0)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def install(machine: Machine, library: Library) -> str:
    """The command that brings a library, by the extra it belongs to."""
    if library.name == "tensorrt" and l4t_release(machine.text("/etc/nv_tegra_release")):
        # JetPack's bindings fit its own Python only, and no wheel replaces them.
        return "apt-get install python3-libnvinfer, and a venv with --system-site-packages"
    if library.name in ("tensorrt", "tensorrt-rtx") and machine.arch not in ("x86_64", "AMD64"):
        return f"none: {library.name} has no wheel for {machine.arch}"
    if library.extra == "dev":  # one tool of many: nobody needs the others for it
        return f"{pip()} install {library.name}"
    extra = f"[{library.extra}]" if library.extra else ""
    if machine.version("pspec-toolkit") is None:
        return f'{pip()} install -e ".{extra}"'
    return f'{pip()} install "pspec-toolkit{extra}"'


def pip() -> str:
    """How to call the pip of this very interpreter, whose environment may not be active."""
    python, here, found = Path(sys.executable), Path.cwd(), shutil.which("pip")
    if found and Path(found).parent == python.parent:
        return "pip"
    if here != Path(here.anchor) and python.is_relative_to(here):
        python = python.relative_to(here)
    return f"{python} -m pip"
