"""The engines there are, and which of them a request gets."""

from __future__ import annotations

from pspec.errors import EngineError
from pspec.runtime.bundle import Bundle
from pspec.runtime.engine import Engine
from pspec.runtime.manifest import Role

ENGINES = ("onnxruntime",)


def choose_engine(name: str) -> tuple[str, str]:
    """Engine for a request, and why.

    Raises:
        EngineError: for a name that is unknown or not there yet.
    """
    if name == "auto":
        return "onnxruntime", "the only engine of this release"
    if name not in ENGINES:
        raise EngineError(f"engine {name!r} is not there: use one of auto, {', '.join(ENGINES)}")
    return name, "asked for"


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
    """Open one role's engine.

    Raises:
        EngineError: when it cannot run here, with what would make it run.
    """
    choose_engine(name)
    need_onnxruntime()
    from pspec.runtime.ort import OrtEngine

    manifest = bundle.manifest
    spec = manifest.target if role == "target" else manifest.drafter
    assert spec is not None
    graph = manifest.symbolic(role)
    return OrtEngine(bundle.graphs, graph, spec.cache, manifest.plan, threads)
