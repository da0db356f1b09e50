"""From a target (and a drafter) to a bundle, in named stages that can be resumed.

load -> trace -> weights -> graphs -> parity -> text -> publish. Everything is written into
``.NAME.partial`` beside the output, which is renamed at the end; a run that was interrupted finds
its finished stages there. A run that fails for a reason of its input leaves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
from torch import Tensor

import pspec
from pspec.errors import ConfigError, EngineError, PspecError
from pspec.export.assemble import assemble_graph
from pspec.export.lint import check_graph
from pspec.export.parity import (
    Outputs,
    ParityRow,
    compare_graph,
    make_feeds,
    passed,
    torch_outputs,
)
from pspec.export.plan import drafter_sizes, make_plan, target_sizes
from pspec.export.report import parity_files
from pspec.export.trace import trace_stages
from pspec.export.weights import external_tensors, unique_bytes, write_weights
from pspec.files import disk_errors, publish_folder, sha256_file, write_file
from pspec.models.checkpoint import LoadedTarget, load_target
from pspec.models.decoder import TargetGraph
from pspec.models.drafter import Drafter, DrafterGraph
from pspec.models.drafter_file import check_match, drafter_fingerprint, read_drafter
from pspec.models.graph import GraphModel
from pspec.progress import Watcher
from pspec.runtime.bundle import GRAPH_FOLDER, write_manifest
from pspec.runtime.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    CacheSpec,
    FileHash,
    GraphSpec,
    Manifest,
    ParallelSpec,
    Role,
    ShapePlan,
    StoredTensor,
    TargetSpec,
    TensorSpec,
)

LOOKUP_SLOTS = 8
"""Longest prompt-lookup continuation; it sets the depth of trees in a bundle without a drafter."""
_PROGRESS_FILE = "progress.json"


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
    force: bool = False


@dataclass
class _Job:
    """What the stages hand on."""

    request: ExportRequest
    folder: Path
    watcher: Watcher
    target: LoadedTarget
    drafter: Drafter | None
    plan: ShapePlan
    models: dict[Role, GraphModel]
    finished: dict[str, Any] = field(default_factory=dict)

    @property
    def graphs(self) -> Path:
        return self.folder / GRAPH_FOLDER


def plan_export(request: ExportRequest) -> tuple[LoadedTarget, Drafter | None, ShapePlan]:
    """Load and check everything that can be refused before any work is done.

    Raises:
        PspecError: for the first thing that cannot be exported.
    """
    if request.precision != "fp32":
        raise ConfigError(f"--precision {request.precision} is not there yet: use fp32")
    if request.platform != "generic":
        raise ConfigError(f"--platform {request.platform} is not there yet: use generic")
    _check_output(request)
    drafter = read_drafter(request.drafter) if request.drafter else None
    target = load_target(request.target)
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


def _check_output(request: ExportRequest) -> None:
    """Refuse a place that cannot be written or that holds what is to be read."""
    output = request.output
    if os.path.lexists(output) and not request.force:
        raise ConfigError(f"{output} is in use: choose another --output or pass --force")
    drafter = [request.drafter] if request.drafter else []
    for source in (Path(request.target), *drafter, Path.cwd()):
        read = source.expanduser().resolve()
        if output.resolve() in (read, *read.parents) and read.exists():
            raise ConfigError(f"--output {output} would replace {source}: choose another")
    with disk_errors(output):
        place = _missing_parents(output)[0].parent
        if not place.is_dir():
            raise ConfigError(f"--output {output}: {place} is not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable", str(place))


def _missing_parents(output: Path) -> list[Path]:
    """``output`` and the folders above it that are not there yet, from the top."""
    output = output.absolute()
    missing = [path for path in output.parents if not os.path.lexists(path)]
    return [*reversed(missing), output]


def export_bundle(request: ExportRequest, watcher: Watcher | None = None) -> Path:
    """Export, and return the bundle's folder.

    Raises:
        PspecError: for bad input, a failed parity check or a full disk; nothing is left then.
    """
    watcher = watcher or Watcher()
    watcher.stage("load", request.target)
    target, drafter, plan = plan_export(request)
    output = request.output.absolute()
    folder = output.with_name(f".{output.name}.partial")
    made = _missing_parents(output)[:-1]
    models = _graph_models(target, drafter, plan)
    job = _Job(request, folder, watcher, target, drafter, plan, models)
    try:
        with disk_errors(output):
            _resume(job)
            stored = _write_weights(job)
            specs = _write_graphs(job, stored)
            rows = _check_parity(job, specs)
            _write_text(job, rows)
            _publish(job, stored, specs, output)
    except (PspecError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    return request.output


def _graph_models(
    target: LoadedTarget, drafter: Drafter | None, plan: ShapePlan
) -> dict[Role, GraphModel]:
    features = drafter.config.features if drafter else "none"
    models: dict[Role, GraphModel] = {
        "target": TargetGraph(
            target.decoder,
            batch=plan.batch,
            positions=plan.max_context,
            features=() if features == "none" else features,
        )
    }
    if drafter is not None:
        models["drafter"] = DrafterGraph(
            drafter, target.decoder, batch=plan.batch, positions=plan.max_context
        )
    return models


def _resume(job: _Job) -> None:
    """Find what an interrupted run of the very same export finished."""
    key = _fingerprint(job)
    path = job.folder / _PROGRESS_FILE
    try:
        finished = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        finished = {}
    if finished.get("key") != key:
        shutil.rmtree(job.folder, ignore_errors=True)
        finished = {"key": key}
    elif len(finished) > 1:
        job.watcher.note(f"resuming: {', '.join(sorted(finished.keys() - {'key'}))} already done")
    job.graphs.mkdir(parents=True, exist_ok=True)
    for stale in job.folder.rglob("*.partial"):  # of a process that was killed
        stale.unlink()
    job.finished = finished


def _finish(job: _Job, stage: str, result: object) -> None:
    job.finished[stage] = msgspec.to_builtins(result)
    write_file(job.folder / _PROGRESS_FILE, msgspec.json.encode(job.finished))


def _write_weights(job: _Job) -> list[StoredTensor]:
    if "weights" in job.finished:
        return msgspec.convert(job.finished["weights"], list[StoredTensor])
    tensors = dict(_named_weights(job.models.values()))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _check_space(job, total)
    job.watcher.stage("weights", f"{len(tensors)} tensors, {total / 1e6:.0f} MB")
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        job.watcher.advance(done, total)

    stored = write_weights(sorted(tensors.items()), job.graphs, advance)
    _finish(job, "weights", stored)
    return stored


def _named_weights(models: Iterable[GraphModel]) -> Iterable[tuple[str, Tensor]]:
    for model in models:
        for stage in model.stages:
            tensors = stage.module.state_dict()
            yield from ((stored, tensors[name]) for name, stored in stage.weights.items())


def _check_space(job: _Job, total: int) -> None:
    free = shutil.disk_usage(job.folder).free
    if free < 1.05 * total:
        raise PspecError(
            f"{job.request.output}: the bundle needs {total / 1e6:.0f} MB, the disk has "
            f"{free / 1e6:.0f} MB free"
        )


def _write_graphs(job: _Job, stored: Sequence[StoredTensor]) -> list[GraphSpec]:
    """Trace once a role, then write the symbolic graph and one static graph a shape."""
    if "graphs" in job.finished:
        return msgspec.convert(job.finished["graphs"], list[GraphSpec])
    tensors = external_tensors(stored, job.graphs)
    specs = []
    for role, model in job.models.items():
        job.watcher.stage("trace", role)
        traced = trace_stages(model)
        shapes = [{}, *_sizes(role, job.plan)]
        job.watcher.stage("graphs", f"{role}: symbolic and {len(shapes) - 1} static")
        for number, sizes in enumerate(shapes, start=1):
            graph = assemble_graph(model, traced, tensors, sizes, role)
            file = f"{role}.{_shape_name(sizes)}.onnx"
            if sizes:
                check_graph(graph, file)
            ir.save(graph, job.graphs / file)
            specs.append(_graph_spec(file, role, sizes, graph))
            job.watcher.advance(number, len(shapes))
    _finish(job, "graphs", specs)
    return specs


def _sizes(role: Role, plan: ShapePlan) -> list[dict[str, int]]:
    return target_sizes(plan) if role == "target" else drafter_sizes(plan)


def _shape_name(sizes: dict[str, int]) -> str:
    if not sizes:
        return "symbolic"
    count = sizes.get("nodes") or sizes["accepted"]
    return f"{'n' if 'nodes' in sizes else 'a'}{count}.s{sizes['slots']}"


def _graph_spec(file: str, role: Role, sizes: dict[str, int], graph: ir.Model) -> GraphSpec:
    names = {"FLOAT": "float32", "FLOAT16": "float16", "INT32": "int32", "BOOL": "bool"}

    def specs(values: Iterable[ir.Value]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                str(value.name),
                tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ()),
                names[value.dtype.name if value.dtype else ""],  # type: ignore[arg-type]
            )
            for value in values
        )

    return GraphSpec(file, role, sizes, specs(graph.graph.inputs), specs(graph.graph.outputs))


def _check_parity(job: _Job, specs: Sequence[GraphSpec]) -> list[ParityRow]:
    """Compare every graph with PyTorch, whose weights are let go before the graphs are loaded."""
    if "parity" in job.finished:
        return msgspec.convert(job.finished["parity"], list[ParityRow])
    vocab = job.target.config.vocab_size
    wanted: dict[tuple[str, str], Outputs] = {}
    inputs = dict(job.models)
    job.watcher.stage("parity", f"PyTorch reference for {len(specs)} graphs")
    for spec in specs:
        for kind in ("fixed", "random"):
            feeds = make_feeds(inputs[spec.role], _check_sizes(spec, job.plan), kind, vocab)
            wanted[spec.file, kind] = torch_outputs(inputs[spec.role], feeds)
        job.watcher.advance(len(wanted), 2 * len(specs))
    _release(job)
    job.watcher.stage("parity", f"{len(specs)} graphs in ONNX Runtime")
    rows: list[ParityRow] = []
    for number, spec in enumerate(specs, start=1):
        sizes = _check_sizes(spec, job.plan)
        cases = (
            (kind, make_feeds(inputs[spec.role], sizes, kind, vocab), wanted.pop((spec.file, kind)))
            for kind in ("fixed", "random")
        )
        rows += compare_graph(job.graphs / spec.file, cases)
        job.watcher.advance(number, len(specs))
    if not passed(rows):
        worst = max((row for row in rows if not row.passed), key=lambda row: row.error)
        raise EngineError(
            f"parity failed: {worst.graph} on {worst.inputs} inputs differs from PyTorch by "
            f"{worst.error:.1e}, {worst.agree:.1%} of tokens agree; this is a fault of the export"
        )
    _finish(job, "parity", rows)
    return rows


def _check_sizes(spec: GraphSpec, plan: ShapePlan) -> dict[str, int]:
    """Sizes a graph is checked at; the symbolic one at a shape that no static graph has."""
    if spec.sizes:
        return spec.sizes
    slots = plan.buckets[0] - 3 if plan.buckets[0] > 8 else plan.buckets[0]
    count = 5
    if spec.role == "target":
        return {"nodes": count, "slots": slots, "rows": 2}
    return {"accepted": count, "slots": slots}


def _release(job: _Job) -> None:
    """Drop the weights; names and shapes of the stages are all that is left to use."""
    for model in job.models.values():
        for stage in model.stages:
            stage.module.to("meta")
    gc.collect()  # the tracer leaves cycles that hold parameters


def _write_text(job: _Job, rows: Sequence[ParityRow]) -> None:
    job.watcher.stage("text", "tokenizer, chat template, reports")
    job.target.save_text_files(job.folder)
    parity_files(rows, job.folder / "reports")


def _publish(
    job: _Job, stored: Sequence[StoredTensor], specs: Sequence[GraphSpec], output: Path
) -> None:
    job.watcher.stage("publish", str(job.request.output))
    own = (_PROGRESS_FILE, MANIFEST_FILE)
    files = sorted(p for p in job.folder.rglob("*") if p.is_file() and p.name not in own)
    hashes = {}
    for number, path in enumerate(files, start=1):
        name = path.relative_to(job.folder).as_posix()
        hashes[name] = FileHash(path.stat().st_size, sha256_file(path))
        job.watcher.advance(number, len(files))
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=target_name(job.target),
        platform=job.request.platform,
        precision=job.request.precision,
        target=_target_spec(job),
        drafter=_drafter_spec(job),
        plan=job.plan,
        graphs=tuple(specs),
        tensors=tuple(stored),
        provenance=_provenance(job, stored),
        files=hashes,
    )
    write_manifest(job.folder, manifest)
    (job.folder / _PROGRESS_FILE).unlink()
    publish_folder(job.folder, output)


def target_name(target: LoadedTarget) -> str:
    """What people call the target: the last part of a folder, file or hub id."""
    return Path(target.source).name.removesuffix(".gguf")


def _target_spec(job: _Job) -> TargetSpec:
    config, model = job.target.config, job.models["target"]
    assert isinstance(model, TargetGraph)
    block = config.block
    return TargetSpec(
        family=config.family,
        vocab_size=config.vocab_size,
        hidden_size=block.hidden_size,
        max_positions=config.max_positions,
        cache=CacheSpec(config.num_layers, block.num_key_value_heads, block.head_dim),
        features=model.features or "none",
        feature_size=model.feature_size if model.features else 0,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
    )


def _drafter_spec(job: _Job) -> ParallelSpec | None:
    if job.drafter is None:
        return None
    config, model = job.drafter.config, job.models["drafter"]
    assert isinstance(model, DrafterGraph)
    block = config.block
    return ParallelSpec(
        slots=config.slots,
        candidates=model.candidates,
        shift=config.shift,
        feature_size=config.feature_size,
        cache=CacheSpec(config.num_layers, block.num_key_value_heads, block.head_dim),
        config=msgspec.to_builtins(config),
    )


def _provenance(job: _Job, stored: Sequence[StoredTensor]) -> dict[str, str]:
    return {
        **_versions(),
        "target_fingerprint": job.target.fingerprint,
        "drafter_fingerprint": _drafter_key(job.request),
        "weight_bytes": str(unique_bytes(stored)),
    }


def _versions() -> dict[str, str]:
    packages = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime")
    return {
        "pspec": pspec.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _drafter_key(request: ExportRequest) -> str:
    return drafter_fingerprint(request.drafter) if request.drafter else "none"


def _fingerprint(job: _Job) -> str:
    request = job.request
    parts = [
        repr(_versions()),
        job.target.fingerprint,
        _drafter_key(request),
        request.precision,
        request.platform,
        repr(job.plan),
    ]
    return sha256("\n".join(parts).encode()).hexdigest()
