"""Rules about the files themselves: what may be imported where, and what no file may name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("calibrate", "export", "models", "runtime")

HEAVY = frozenset(
    {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "gguf", "accelerate"}
)
"""What a machine that only runs bundles need not have."""

MAY_NOT_IMPORT = {
    "runtime": HEAVY | {"pspec.models", "pspec.export", "pspec.calibrate"},
    "models": frozenset({"onnx", "onnx_ir", "onnxscript", "pspec.export", "pspec.calibrate"}),
}

# Written so that no pattern matches its own text.
FORBIDDEN = {
    "a registry's host": re.compile(
        r"\bpypi\.\w|pythonhosted\.\w|registry\.npmjs|(?:deb|security)\.debian\.\w|crates\.i[o]\b"
        r"|download\.pytorch|proxy\.golang|ngc\.nvidia\.\w|jetson-ai-lab\.\w"
    ),
    "a package index": re.compile(
        r"--(?:extra-)?index-u[r]l|--find-link[s]|PIP_(?:EXTRA_)?INDE[X]"
    ),
    "a path of one machine": re.compile(r"(?<![\w.~-])/(?:work|farm|root|home|tmp)/\w"),
}


@cache
def repository_files(*, tracked: bool = False) -> tuple[Path, ...]:
    """Files that git holds, or would add too; empty links and folders left out."""
    others = [] if tracked else ["--others", "--exclude-standard"]
    command = ["git", "ls-files", "-z", "--cached", *others]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def text_of(path: Path) -> str:
    """Text of a file; empty for a binary one."""
    data = path.read_bytes()
    return "" if b"\0" in data[:4096] else data.decode("utf-8", errors="replace")


def sources(*folders: str) -> Iterator[Path]:
    """Python files of top-level folders."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, wherever it stands, as ``(line, full name)``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in repository_files()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a registry's host", "see https://" + "pypi" + ".org/simple"),
        ("a registry's host", "files.python" + "hosted.org"),
        ("a package index", "pip install --extra-index" + "-url X"),
        ("a path of one machine", "cd /" + "tmp/x"),
    ],
)
def test_rule_sees_what_it_forbids(what: str, line: str) -> None:
    assert FORBIDDEN[what].search(line)


@pytest.mark.parametrize("folder", MAY_NOT_IMPORT)
def test_layers(folder: str) -> None:
    banned = MAY_NOT_IMPORT[folder]
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(folder)
        for line, name in imports(path)
        if any(name == ban or name.startswith(f"{ban}.") for ban in banned)
    ]
    assert not found, "\n".join(found)


def test_runtime_imports_without_torch_transformers_and_onnx() -> None:
    # Optional engines and the server may miss their own library; nothing else may be missing.
    code = f"""
import importlib, pkgutil, sys
for name in {sorted(HEAVY)!r}:
    sys.modules[name] = None
import pspec.runtime
for info in pkgutil.walk_packages(pspec.runtime.__path__, "pspec.runtime."):
    try:
        importlib.import_module(info.name)
    except ModuleNotFoundError as error:
        optional = {{"starlette", "uvicorn", "tensorrt", "tensorrt_rtx", "cuda", "onnxruntime"}}
        if str(error.name).split(".")[0] not in optional:
            raise
"""
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_imports_are_declared() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    names = {group: {_module(entry) for entry in entries} for group, entries in groups.items()}
    lean = {"", "cpu", "rtx", "tensorrt", "cuda", "serve"}
    known = {"pspec", "__future__", *sys.stdlib_module_names}
    for folder in (*FOLDERS, "src/pspec"):
        groups_of_folder = lean if folder == "runtime" else names.keys() - {"dev"}
        allowed = known.union(*(names[group] for group in groups_of_folder))
        paths = (ROOT / folder).glob("*.py") if folder == "src/pspec" else sources(folder)
        found = [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for path in paths
            for line, name in imports(path)
            if name.partition(".")[0] not in allowed
        ]
        assert not found, "\n".join(found)


def _module(requirement: str) -> str:
    """What a requirement imports as."""
    match = re.match(r"[\w-]+", requirement)
    assert match is not None
    name = match[0].lower().replace("-", "_")
    return {"cuda_bindings": "cuda", "onnxruntime_gpu": "onnxruntime"}.get(name, name)


def test_only_the_command_line_prints() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in [*sources(*FOLDERS), *(ROOT / "src/pspec").glob("*.py")]
        if not path.name.startswith("cli")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("print", "breakpoint")
    ]
    assert not found, "\n".join(found)


def test_own_folders_are_not_top_level_modules() -> None:
    assert not set(FOLDERS) & sys.modules.keys()


def test_no_large_file() -> None:
    # A bundle that somebody exported here is theirs; the history is everybody's.
    files = repository_files(tracked=True)
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in files}
    assert not {str(path): size for path, size in sizes.items() if size > 64 << 20}
