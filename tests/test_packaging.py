"""The wheel: nothing missing, nothing extra, and no dependency that has no place in it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("calibrate", "export", "models", "runtime")
DATA = {".jinja", ".json", ".jsonl", ".safetensors", ".txt"}


def packaged_files() -> Iterator[str]:
    """What the tree says a wheel must hold, by its path there."""
    package = ROOT / "src/pspec"
    for root in (package, *(ROOT / folder for folder in FOLDERS)):
        inside = "pspec" if root == package else f"pspec/{root.name}"
        # Links are not followed: the linked folders have their own turn.
        for path in sorted(root.rglob("*")):
            kept = path.suffix in {".py", *DATA} or path.name == "py.typed"
            if path.is_file() and kept and "__pycache__" not in path.parts:
                yield f"{inside}/{path.relative_to(root).as_posix()}"


def copy_tree(target: Path) -> None:
    """Copy what git holds or would add, links as links: a build writes into its tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built the long way, through the source distribution, from a copy of the tree."""
    for module in ("build", "setuptools"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module}: install the dev extra")
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    copy_tree(tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message) -> dict[str, set[str]]:
    """Names of the distributions each extra brings; the base under the empty name."""
    found: dict[str, set[str]] = {}
    for line in metadata.get_all("Requires-Dist") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        assert name is not None
        found.setdefault(extra[1] if extra else "", set()).add(name[0].lower())
    return found


@pytest.mark.slow
def test_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names == set(packaged_files())


@pytest.mark.slow
def test_wheel_is_pure_and_carries_its_licence(wheel: Path) -> None:
    assert wheel.name.startswith("pspec_toolkit-")
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry,) = (n for n in names if n.endswith("entry_points.txt"))
        scripts = archive.read(entry).decode()
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert "pspec = pspec.cli:main" in scripts
    assert "pspec-export = pspec.cli:export_main" in scripts


@pytest.mark.slow
def test_base_is_light_and_no_extra_brings_the_model(metadata: Message) -> None:
    extras = requirements(metadata)
    assert extras[""] == {"click", "jinja2", "msgspec", "numpy", "rich", "tokenizers"}
    assert extras["cpu"] == {"onnxruntime"}
    assert extras["gpu"] == {"onnxruntime-gpu"}
    everything = set().union(*extras.values())
    # It would compile llama.cpp; the demo fetches its file instead.
    assert not {name for name in everything if name.startswith(("llm", "llama"))}


@pytest.mark.slow
def test_no_python_is_shut_out_and_no_release_is_capped(metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.10"
    lines = metadata.get_all("Requires-Dist") or []
    assert not [line for line in lines if re.search(r"==|<|~=|!=", line.split(";")[0])]


def test_links_lead_to_the_top_level_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "src/pspec" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("../..") / folder
