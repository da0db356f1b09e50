"""What to export, checked before any work is done."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from pspec.errors import ConfigError
from pspec.export.plan import make_plan
from pspec.export.precision import PRECISIONS, untie_head
from pspec.files import disk_errors, expand_user
from pspec.models.checkpoint import LoadedTarget, load_target
from pspec.models.decoder import TargetGraph
from pspec.models.drafter import Drafter
from pspec.models.drafter_file import check_match, read_drafter
from pspec.models.drafter_graph import DrafterGraph
from pspec.models.graph import GraphModel
from pspec.runtime.manifest import MANIFEST_FILE, Role, ShapePlan

LOOKUP_SLOTS = 8
"""Longest prompt-lookup continuation; it sets the depth of trees in a bundle without a drafter."""


@dataclass(frozen=True)
class ExportRequest:
    """What to export; every field has a command-line option of its name."""

    target: str
    output: Path
    drafter: Path | None = None
    precision: str = "fp32"
    platform: str = "generic"
    max_context: int = 1024
    nodes: int = 8
    batch: int = 1
    min_agreement: float | None = None
    engine: str = "none"
    force: bool = False


def plan_export(request: ExportRequest) -> tuple[LoadedTarget, Drafter | None, ShapePlan]:
    """Load and check everything that can be refused before any work is done.

    Raises:
        PspecError: for the first thing that cannot be exported.
    """
    if request.precision != "fp32" and request.precision not in PRECISIONS:
        known = ", ".join(("fp32", *PRECISIONS))
        raise ConfigError(f"--precision {request.precision} is not there: use one of {known}")
    least = request.min_agreement
    if least is not None and not 0 <= least <= 1:
        raise ConfigError(f"--min-agreement {least} is not in 0..1, a share of tokens")
    if request.platform != "generic":
        raise ConfigError(f"--platform {request.platform} is not there yet: use generic")
    check_output(request)
    drafter = read_drafter(request.drafter) if request.drafter else None
    target = load_target(request.target)
    if request.precision != "fp32":
        untie_head(target.decoder)
    if drafter is not None and request.drafter is not None:
        check_match(drafter.config, target.config, request.drafter)
    plan = make_plan(
        max_context=request.max_context,
        nodes=request.nodes,
        batch=request.batch,
        slots=drafter.config.slots if drafter else LOOKUP_SLOTS,
        limit=target.config.max_positions,
    )
    return target, drafter, plan


def check_output(request: ExportRequest) -> None:
    """Refuse a place that cannot be written, or where something would be lost.

    Raises:
        PspecError: naming the place and what is wrong with it.
    """
    output = request.output
    drafter = [request.drafter] if request.drafter else []
    check_place(output, Path(request.target), *drafter)
    if not replaceable(output):
        raise ConfigError(
            f"{output} is in use and no bundle, so not even --force replaces it: choose another "
            "--output"
        )
    if os.path.lexists(output) and not request.force:
        raise ConfigError(f"{output} is in use: choose another --output or pass --force")


def check_place(output: Path, *inputs: Path) -> None:
    """Refuse a place that cannot be written or that holds what is to be read.

    Raises:
        PspecError: naming the place and what is wrong with it.
    """
    for source in (*inputs, Path.cwd()):
        read = expand_user(source).resolve()
        if output.resolve() in (read, *read.parents) and read.exists():
            raise ConfigError(f"--output {output} would replace {source}: choose another")
    with disk_errors(output):
        place = missing_parents(output)[0].parent
        if not place.is_dir():
            raise ConfigError(f"--output {output}: {place} is not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable", str(place))


def replaceable(output: Path) -> bool:
    """Whether a bundle may take this place: nothing is there, an empty folder, or a bundle."""
    if not os.path.lexists(output):
        return True
    with disk_errors(output):
        if not output.is_dir():
            return False
        return (output / MANIFEST_FILE).is_file() or not any(output.iterdir())


def missing_parents(output: Path) -> list[Path]:
    """``output`` and the folders above it that are not there yet, from the top."""
    output = output.absolute()
    missing = [path for path in output.parents if not os.path.lexists(path)]
    return [*reversed(missing), output]


def graph_models(
    target: LoadedTarget, drafter: Drafter | None, plan: ShapePlan
) -> dict[Role, GraphModel]:
    """The graphs of a bundle by role."""
    features = drafter.config.features if drafter else "none"
    models: dict[Role, GraphModel] = {
        "target": TargetGraph(
            target.decoder,
            positions=plan.max_context,
            features=() if features == "none" else features,
        )
    }
    if drafter is not None:
        models["drafter"] = DrafterGraph(drafter, target.decoder, positions=plan.max_context)
    return models
