"""The command line as its users meet it: called in this process, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from pspec import cli
from pspec.files import sha256_file
from pspec.runtime.bundle import parse_manifest, write_manifest
from pspec.runtime.manifest import MANIFEST_FILE, FileHash, Manifest

ROOT = Path(__file__).resolve().parents[1]
MACHINE_FREE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
RUNTIME_ONLY = (
    *("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"),
    "huggingface_hub",
)
"""What a machine that only runs bundles lacks."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    def refused(self, *names: str) -> None:
        """Assert status 2 and one line on standard error, which holds every one of ``names``."""
        shown = f"status {self.status}\n{self.stderr}"
        assert self.status == 2, shown
        assert self.stderr.startswith("error: "), shown
        assert self.stderr.count("\n") == 1, shown
        assert self.stderr.endswith("\n"), shown
        for name in names:
            assert name in self.stderr, f"{name!r} is not in: {shown}"

    def went_well(self) -> str:
        """Assert status 0 and a silent standard error; returns standard output."""
        assert (self.status, self.stderr) == (0, "")
        return self.stdout


def call(*arguments: str | Path, program: str = "pspec") -> Done:
    """Run a command in this process, from its entry point on."""
    main = cli.export_main if program == "pspec-export" else cli.main
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", [program, *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
    return Done(status, out.getvalue(), err.getvalue())


def export(*arguments: str | Path) -> Done:
    """``pspec-export`` in this process."""
    return call(*arguments, program="pspec-export")


def command_line(
    *arguments: str | Path, program: str = "pspec", without: Iterable[str] = (), prelude: str = ""
) -> list[str]:
    """What starts a command in a process where some modules cannot be imported.

    ``prelude`` is code that runs before it.
    """
    entry = "export_main" if program == "pspec-export" else "main"
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({list(without)!r}))\n{prelude}\n"
        f"from pspec.cli import {entry}\n{entry}()"
    )
    return [sys.executable, "-c", code, *map(str, arguments)]


def environment(**variables: str) -> Mapping[str, str]:
    """The environment of a command's own process."""
    return {**os.environ, **MACHINE_FREE, "PYTHONPATH": str(ROOT / "src"), **variables}


def spawn(
    *arguments: str | Path,
    program: str = "pspec",
    without: Iterable[str] = (),
    prelude: str = "",
    typed: str = "",
    before: Callable[[], None] | None = None,
    **variables: str,
) -> Done:
    """Run a command in a process of its own.

    Args:
        *arguments: of the command.
        program: ``pspec`` or ``pspec-export``.
        without: modules that cannot be imported there.
        prelude: code that runs there first.
        typed: standard input.
        before: called in the new process before the command starts.
        **variables: of its environment.
    """
    done = subprocess.run(
        command_line(*arguments, program=program, without=without, prelude=prelude),
        input=typed,
        env=environment(**variables),
        preexec_fn=before,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def copy_folder(source: Path, destination: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(source, destination)
    return destination


def read_manifest(bundle: Path) -> Manifest:
    """A bundle's manifest."""
    return parse_manifest((bundle / MANIFEST_FILE).read_bytes())


def seal(bundle: Path, **changes: Any) -> None:
    """Change fields of the manifest and bring its hashes up to date, as a forger would.

    An engine was built from the old ones: it goes.
    """
    shutil.rmtree(bundle / "engines", ignore_errors=True)
    manifest = read_manifest(bundle)
    paths = {name: bundle / name for name in manifest.files}
    files = {
        name: FileHash(path.stat().st_size, sha256_file(path))
        for name, path in paths.items()
        if path.exists()
    }
    write_manifest(bundle, msgspec.structs.replace(manifest, files=files, **changes))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` by its relative path, but engines, which any test may build."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    found = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in found.items() if "engines/" not in name}
