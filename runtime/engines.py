"""The engines there are, and which of them a request gets."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from pspec.errors import EngineError
from pspec.files import disk_errors
from pspec.progress import Watcher
from pspec.runtime.bundle import Bundle
from pspec.runtime.engine import Engine
from pspec.runtime.manifest import Role

if TYPE_CHECKING:
    from pspec.runtime.fused import FusedEngine

ENGINES = ("onnxruntime", "standard")
BUILT = ("onnxruntime",)
"""Those that are built from a bundle before they run."""
HEAD_STEP = 8
"""Heads of the fused attention have a multiple of this many channels."""


def choose_engine(name: str, bundle: Bundle | None = None) -> tuple[str, str]:
    """Engine for a request, and why; ``auto`` looks at the bundle.

    Raises:
        EngineError: for a name that is unknown or not there yet.
    """
    if name == "auto":
        for size in _head_sizes(bundle):
            if size % HEAD_STEP:
                return "standard", f"heads of {size} channels have no fused form"
        return "onnxruntime", "the fastest that runs here"
    if name not in ENGINES:
        raise EngineError(f"engine {name!r} is not there: use one of auto, {', '.join(ENGINES)}")
    return name, "asked for"


def _head_sizes(bundle: Bundle | None) -> list[int]:
    return [bundle.manifest.cache(role).size for role in bundle.manifest.roles] if bundle else []


def engine_version(name: str) -> str:
    """Version of the library behind an engine that can run here."""
    assert name in ENGINES, name
    import onnxruntime

    version: str = onnxruntime.__version__
    return version


def need_onnxruntime() -> None:
    """Import the library of the default engine, which a machine may lack.

    Raises:
        EngineError: with the command that installs it.
    """
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        hint = "pip install 'pspec-toolkit[cpu]'"
        raise EngineError(f"onnxruntime does not load ({error}): {hint}") from error


def open_engine(bundle: Bundle, role: Role, name: str, threads: int | None) -> Engine:
    """Open one role's engine; one that must be built and is not yet is built now.

    Raises:
        EngineError: when it cannot run here, with what would make it run.
    """
    chosen, _ = choose_engine(name, bundle)
    need_onnxruntime()
    if chosen == "standard":
        from pspec.runtime.standard import StandardEngine

        return StandardEngine(bundle, role, threads)
    return open_fused(bundle, role, threads)


def open_fused(
    bundle: Bundle,
    role: Role,
    threads: int | None,
    batch: int | None = None,
    context: int | None = None,
) -> FusedEngine:
    """Open the fused engine, of other rows and context than the bundle's; built where missing.

    Raises:
        EngineError: when it can't be built or run here, with what would help.
    """
    need_onnxruntime()
    from pspec.runtime.fused import FusedEngine, engine_folder

    if not engine_folder(bundle).exists():
        build_engine(bundle)
    return FusedEngine(bundle, role, threads, batch=batch, context=context)


def is_current(bundle: Bundle) -> bool:
    """Whether the bundle has its engine, whole and built from it."""
    from pspec.runtime.fused import read_sidecar

    try:
        read_sidecar(bundle)
    except EngineError:
        return False
    return True


def build_engine(bundle: Bundle, watcher: Watcher | None = None) -> Path:
    """Build the default engine into the bundle; returns its folder.

    What builds an engine is an entry point of the group ``pspec.builders``: the runtime itself
    needs none of the packages that building does.

    Raises:
        EngineError: where they are not installed.
    """
    builder = next(iter(entry_points(group="pspec.builders", name="onnxruntime")), None)
    if builder is None:  # a checkout on the path, or metadata of an older release
        raise EngineError(
            f"{bundle.folder} has no engine yet, and the pspec that runs is not installed, so it "
            "finds no builder: pip install it, or run the standard graphs with --engine standard"
        )
    try:
        build = builder.load()
    except ImportError as error:
        raise EngineError(
            f"{bundle.folder} has no engine yet, and none can be built here ({error}): pip install "
            "'pspec-toolkit[build]', or run the standard graphs with --engine standard"
        ) from error
    with disk_errors(bundle.folder / "engines"):
        folder: Path = build(bundle, watcher)
    return folder
