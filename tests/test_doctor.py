"""`pspec.doctor` on machines that we make up, and on the one at hand."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pspec import doctor, show
from pspec.doctor import Device, Library, Machine, Report, Row, examine
from pspec.runtime.engines import ENGINES

ROOT = Path(__file__).resolve().parents[1]
RTX = Device("an RTX GPU", "8.9", 24.0)
ORIN = Device("an Orin GPU", "8.7", 15.0)

RUNTIME = {"numpy": "2.2.6", "tokenizers": "0.23.3", "jinja2": "3.1.6", "onnxruntime": "1.23.2"}
EXPORT = {lib.name: lib.least for lib in doctor.LIBRARIES if lib.area == "export"}
MEMINFO = "MemTotal:  16777216 kB\nMemFree: 1 kB\nMemAvailable:  8388608 kB\n"


class Fake(Machine):
    """A machine whose every answer is given."""

    system = "Linux"
    arch = "x86_64"
    python = (3, 12, 1)

    def __init__(
        self,
        installed: dict[str, str],
        *,
        devices: tuple[Device, ...] | None = None,
        files: dict[str, str] | None = None,
        modules: dict[str, str] | None = None,
        broken: frozenset[str] = frozenset(),
        arch: str = "x86_64",
    ) -> None:
        self.installed = {"pspec-toolkit": "0.1.0", **installed}
        self.gpus = devices
        self.files = {"/proc/meminfo": MEMINFO, **(files or {})}
        self.modules = modules or {}
        self.broken = broken
        self.arch = arch

    def version(self, distribution: str) -> str | None:
        return self.installed.get(distribution)

    def importable(self, module: str) -> bool:
        return module in self.modules

    def text(self, path: str) -> str:
        return self.files.get(path, "")

    def evaluate(self, module: str, expression: str) -> tuple[bool, str]:
        if module in self.broken:
            return False, f"ImportError: {module} is damaged"
        if module == "onnxruntime":
            cuda = "CUDAExecutionProvider " if "onnxruntime-gpu" in self.installed else ""
            return True, f"{cuda}CPUExecutionProvider"
        return True, self.modules.get(module) or self.installed[module.replace("_", "-")]

    def devices(self) -> tuple[Device, ...] | None:
        return self.gpus

    def usable_cpus(self) -> int:
        return 4

    def free_disk(self) -> int:
        return 50 << 30


@pytest.fixture
def every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ENGINES", ("onnxruntime", "tensorrt", "tensorrt-rtx"))


def row(report: Report, name: str) -> Row:
    (found,) = [row for row in report.rows if row.name == name]
    return found


def test_runtime_only_machine_runs_and_names_the_extra_it_lacks() -> None:
    report = examine(Fake(RUNTIME))
    assert report.runs == ("onnxruntime",)
    assert report.builds == ()
    assert not report.exports
    assert not report.failed
    assert row(report, "torch").state == "missing"
    assert row(report, "torch").fix.endswith('pip install "pspec-toolkit[export]"')
    assert row(report, "tensorrt-rtx").fix.endswith('pip install "pspec-toolkit[rtx]"')
    assert row(report, "polygraphy").fix.endswith("pip install polygraphy")


@pytest.mark.usefixtures("every_engine")
def test_full_workstation() -> None:
    installed = {**RUNTIME, **EXPORT, "tensorrt-rtx": "1.7.1", "cuda-bindings": "13.0.0"}
    report = examine(Fake(installed, devices=(RTX,)))
    assert report.exports
    assert report.builds == ("onnxruntime", "tensorrt-rtx")
    assert report.runs == ("onnxruntime", "tensorrt-rtx")
    assert "8.9" in row(report, "cuda device").found


def test_two_onnxruntimes_are_the_failure_and_both_must_go() -> None:
    report = examine(Fake({**RUNTIME, "onnxruntime-gpu": "1.23.2"}, devices=(RTX,)))
    assert report.failed
    assert report.runs == ()
    found = row(report, "onnxruntime")
    assert found.state == "fail"
    assert "uninstall -y onnxruntime onnxruntime-gpu && " in found.fix
    assert found.fix.endswith('"pspec-toolkit[gpu]"')


def test_no_onnxruntime_is_missing_not_failed() -> None:
    installed = {k: v for k, v in RUNTIME.items() if k != "onnxruntime"}
    report = examine(Fake(installed))
    assert row(report, "onnxruntime").state == "missing"
    assert row(report, "onnxruntime").fix.endswith('"pspec-toolkit[cpu]"')
    assert not report.failed
    assert report.runs == ()


def test_gpu_onnxruntime_without_a_gpu_warns() -> None:
    installed = {k: v for k, v in RUNTIME.items() if k != "onnxruntime"}
    report = examine(Fake({**installed, "onnxruntime-gpu": "1.23.2"}))
    assert row(report, "onnxruntime").state == "warn"
    assert report.runs == ("onnxruntime",)


def test_library_that_does_not_load_fails_with_its_own_words() -> None:
    report = examine(Fake(RUNTIME, broken=frozenset({"onnxruntime"})))
    assert report.failed
    assert "onnxruntime is damaged" in row(report, "onnxruntime").found


def test_old_library_is_missing_with_both_versions() -> None:
    report = examine(Fake({**RUNTIME, **EXPORT, "torch": "2.1.0+cpu"}))
    assert row(report, "torch").state == "missing"
    assert row(report, "torch").found == "2.1.0+cpu, older than 2.9"
    assert not report.exports


@pytest.mark.usefixtures("every_engine")
def test_jetson_takes_tensorrt_from_jetpack() -> None:
    files = {"/etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic"}
    machine = Fake(RUNTIME, devices=(ORIN,), files=files, arch="aarch64")
    report = examine(machine)
    assert row(report, "L4T").found == "R36.4.3"
    assert "python3-libnvinfer" in row(report, "tensorrt").fix
    assert "no wheel for aarch64" in row(report, "tensorrt-rtx").fix
    # JetPack's bindings are a module that no distribution owns.
    machine.modules["tensorrt"] = "10.3.0"
    machine.installed["cuda-bindings"] = "12.9.10"
    report = examine(machine)
    assert row(report, "tensorrt").found == "10.3.0"
    assert report.builds == ("tensorrt",)
    assert report.runs == ("onnxruntime", "tensorrt")


@pytest.mark.usefixtures("every_engine")
def test_rtx_engines_do_not_run_on_other_gpus() -> None:
    installed = {**RUNTIME, "tensorrt-rtx": "1.7.1", "cuda-bindings": "13.0.0"}
    report = examine(Fake(installed, devices=(Device("a data-centre GPU", "9.0", 140.0),)))
    assert report.builds == ("tensorrt-rtx",)
    assert report.runs == ("onnxruntime",)


@pytest.mark.usefixtures("every_engine")
def test_tensorrt_without_a_device_neither_builds_nor_runs() -> None:
    report = examine(Fake({**RUNTIME, "tensorrt": "10.16.1", "cuda-bindings": "13.0.0"}))
    assert report.builds == ()
    assert report.runs == ("onnxruntime",)


@pytest.mark.parametrize(
    ("cpuinfo", "state", "found"),
    [
        ("flags\t\t: fpu avx2 avx512_vnni sse\n", "ok", "4 CPUs avx2 avx512_vnni"),
        ("flags\t\t: fpu sse4_2\n", "warn", "4 CPUs, no AVX2: slow"),
        ("Features\t: fp asimd asimddp\n", "ok", "4 CPUs asimd asimddp"),
        ("", "ok", "4 CPUs"),
    ],
)
def test_cpu_features(cpuinfo: str, state: str, found: str) -> None:
    report = examine(Fake(RUNTIME, files={"/proc/cpuinfo": cpuinfo}))
    assert (row(report, "cpu").state, row(report, "cpu").found) == (state, found)


def test_memory_and_disk() -> None:
    report = examine(Fake(RUNTIME))
    assert row(report, "memory").found == "8.0 GiB free of 16.0 GiB"
    assert row(report, "disk").found == "50.0 GiB free here"
    tight = MEMINFO.replace("8388608", "1048576")
    assert doctor.memory_row(tight).state == "warn"
    assert doctor.memory_row("").state == "ok"
    assert doctor.disk_row(1 << 30).state == "warn"


def test_untested_python_warns() -> None:
    machine = Fake(RUNTIME)
    machine.python = (3, 15, 0)
    assert row(examine(machine), "python").state == "warn"


def test_fix_calls_the_pip_of_this_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = Path(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: str(python.parent / name))
    assert doctor.pip() == "pip"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert doctor.pip() == f"{python} -m pip"
    monkeypatch.chdir(python.parent)
    assert doctor.pip() == f"{python.name} -m pip"


def test_checkout_without_install_installs_itself() -> None:
    machine = Fake(RUNTIME)
    del machine.installed["pspec-toolkit"]
    assert row(examine(machine), "torch").fix.endswith('pip install -e ".[export]"')


@pytest.mark.parametrize(
    ("version", "parts"), [("2.13.0+cpu", (2, 13, 0)), ("1.24rc1", (1, 24)), ("", ())]
)
def test_release_numbers(version: str, parts: tuple[int, ...]) -> None:
    assert doctor.release(version) == parts


def test_engine_that_this_release_lacks_is_not_said_to_run() -> None:
    installed = {**RUNTIME, "tensorrt": "10.16.1", "cuda-bindings": "13.0.0"}
    report = examine(Fake(installed, devices=(RTX,)))
    assert report.builds == ("tensorrt",)
    assert report.runs == tuple(name for name in ("onnxruntime", "tensorrt") if name in ENGINES)


def test_table_shows_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rich reads [export] as a style unless told otherwise.
    monkeypatch.setattr(show.console, "width", 300)
    with show.console.capture() as output:
        show.show_report(examine(Fake(RUNTIME)))
    assert '"pspec-toolkit[export]"' in output.get()


def test_each_fix_is_shown_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examine(Fake(RUNTIME))
    monkeypatch.setattr(show.console, "width", 80)

    with show.console.capture() as output:
        show.show_report(report)

    lines = [line.strip() for line in output.get().splitlines()]
    for fix in {row.fix for row in report.rows if row.fix}:
        assert lines.count(fix) == 1
    assert lines[-1] == "this machine cannot export; builds no engine; runs bundles on onnxruntime"


def test_verdict_names_what_is_damaged() -> None:
    both = {**RUNTIME, "onnxruntime-gpu": "1.23.2"}
    with show.console.capture() as output:
        show.show_report(examine(Fake(both)))
    assert output.get().splitlines()[-1].endswith("cannot run bundles; mend first: onnxruntime")


def test_report_is_plain_json() -> None:
    data = json.loads(msgspec.json.encode(examine(Fake(RUNTIME))))
    assert data["exports"] is False
    assert data["rows"][0] == {
        "area": "machine",
        "name": "pspec",
        "state": "ok",
        "found": data["rows"][0]["found"],
        "fix": "",
    }


class Driver:
    """As much of a CUDA driver library as the doctor calls."""

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's own names
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        return put(count, ctypes.c_int, 1)

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802
        return put(handle, ctypes.c_int, index)

    def cuDeviceGetName(self, name: Any, size: int, handle: Any) -> int:  # noqa: N802
        name.value = b"a GPU"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, handle: Any) -> int:  # noqa: N802
        return put(memory, ctypes.c_size_t, 24 << 30)

    def cuDeviceGetAttribute(self, value: Any, number: int, handle: Any) -> int:  # noqa: N802
        return put(value, ctypes.c_int, {75: 8, 76: 9}[number])


def put(reference: Any, kind: Any, value: int) -> int:
    ctypes.cast(reference, ctypes.POINTER(kind))[0] = value
    return 0


def test_devices_as_the_driver_reports_them() -> None:
    assert list(doctor.cuda_devices(Driver())) == [Device("a GPU", "8.9", 24.0)]
    assert list(doctor.cuda_devices(Driver(status=100))) == []


def test_real_machine_is_examined_without_heavy_imports() -> None:
    code = (
        "import sys; from pspec.doctor import examine; r = examine(); "
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'tensorrt', 'tensorrt_rtx'}; "
        "print(len(r.rows), sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows, heavy = done.stdout.split(maxsplit=1)
    assert int(rows) > len(doctor.LIBRARIES)
    assert heavy.strip() == "[]"


def test_least_versions_agree_with_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    wanted = [*doctor.LIBRARIES, Library("run", "onnxruntime", "cpu", "1.23")]
    for library in wanted:
        entries = [entry.split(";")[0].strip() for entry in extras[library.extra]]
        assert f"{library.name}>={library.least}" in entries
