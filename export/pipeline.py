"""From a target (and a drafter) to a bundle, in named stages that can be resumed.

load -> text -> precision -> weights -> trace -> graphs -> parity -> engine -> publish. All is
written into ``.NAME.partial`` beside the output, which is renamed at the end; a run that was
interrupted finds its finished stages there. One that fails leaves nothing.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
from torch import Tensor

from pspec.calibrate.quantise import Quantised
from pspec.errors import EngineError, PspecError
from pspec.export.assemble import assemble_graph
from pspec.export.describe import (
    drafter_spec,
    export_key,
    graph_spec,
    provenance,
    shape_name,
    target_name,
    target_spec,
)
from pspec.export.lint import check_graph
from pspec.export.onnxruntime_engine import build_onnxruntime
from pspec.export.parity import (
    Outputs,
    ParityRow,
    compare_graph,
    make_feeds,
    passed,
    torch_outputs,
)
from pspec.export.plan import drafter_sizes, target_sizes
from pspec.export.precision import (
    PRECISIONS,
    PrecisionReport,
    check_agreement,
    quantise_nearest,
    quantise_target,
    restore_weights,
)
from pspec.export.report import parity_files, precision_files
from pspec.export.request import (
    ExportRequest,
    check_output,
    graph_models,
    missing_parents,
    plan_export,
)
from pspec.export.trace import trace_stages
from pspec.export.weights import (
    WEIGHT_FILE,
    Weight,
    external_tensors,
    read_quantised,
    stored_bytes,
    write_weights,
)
from pspec.files import disk_errors, only_writer, publish_folder, sha256_file, write_file
from pspec.models.checkpoint import LoadedTarget
from pspec.models.graph import GraphModel
from pspec.models.self_text import find_opening
from pspec.progress import Watcher
from pspec.runtime.bundle import GRAPH_FOLDER, open_bundle, write_manifest
from pspec.runtime.engines import BUILT, choose_engine
from pspec.runtime.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    FileHash,
    GraphSpec,
    Manifest,
    Role,
    ShapePlan,
    StoredTensor,
)
from pspec.runtime.text import Text

_PROGRESS_FILE = "progress.json"


@dataclass
class _Job:
    """What the stages hand on."""

    request: ExportRequest
    folder: Path
    watcher: Watcher
    target: LoadedTarget
    plan: ShapePlan
    models: dict[Role, GraphModel]
    quantised: dict[str, Quantised] = field(default_factory=dict)
    precision: PrecisionReport | None = None
    finished: dict[str, Any] = field(default_factory=dict)

    @property
    def graphs(self) -> Path:
        return self.folder / GRAPH_FOLDER


class _Weights(msgspec.Struct):
    """What the stage of that name leaves for a resumed run."""

    tensors: list[StoredTensor]
    sha256: str
    precision: PrecisionReport | None


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
    made = missing_parents(output)[:-1]
    models = graph_models(target, drafter, plan)
    job = _Job(request, folder, watcher, target, plan, models)
    try:
        with disk_errors(output, folder), only_writer(folder):
            _run_stages(job, output)
    except PspecError:
        for parent in reversed(made):  # what this run made and left empty
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    return request.output


def _run_stages(job: _Job, output: Path) -> None:
    try:
        _resume(job)
        _write_text(job)
        _quantise(job)
        stored = _write_weights(job)
        specs = _write_graphs(job, stored)
        _write_reports(job, _check_parity(job, specs))
        _publish(job, stored, specs, output)
    except (PspecError, OSError):
        shutil.rmtree(job.folder, ignore_errors=True)
        raise


def _resume(job: _Job) -> None:
    """Find what an interrupted run of the very same export finished."""
    key = export_key(job.request, job.target, job.plan)
    path = job.folder / _PROGRESS_FILE
    try:
        finished = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        finished = {}
    if finished.get("key") == key and _weights_intact(job, finished):
        job.watcher.note(f"resuming: {', '.join(sorted(finished.keys() - {'key'}))} already done")
        _empty(job.folder, keep=(GRAPH_FOLDER, _PROGRESS_FILE))
    else:  # graphs and parity are worth nothing without the weights they were checked with
        _empty(job.folder)
        finished = {"key": key}
    job.graphs.mkdir(parents=True, exist_ok=True)
    job.finished = finished


def _weights_intact(job: _Job, finished: dict[str, Any]) -> bool:
    """Whether the weight file is still what the stage that ended first has written."""
    try:
        written = msgspec.convert(finished.get("weights"), _Weights)
        return sha256_file(job.graphs / WEIGHT_FILE) == written.sha256
    except (OSError, msgspec.ValidationError):
        return False


def _empty(folder: Path, keep: Collection[str] = ()) -> None:
    """Remove what is in ``folder``, which itself stays: it carries the lock."""
    for entry in folder.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _finish(job: _Job, stage: str, result: object) -> None:
    job.finished[stage] = msgspec.to_builtins(result)
    write_file(job.folder / _PROGRESS_FILE, msgspec.json.encode(job.finished))


def _quantise(job: _Job) -> None:
    """Make the weights those of the wanted precision, in the modules and as they are stored."""
    name = job.request.precision
    if name not in PRECISIONS:
        return
    if "weights" in job.finished:
        done = msgspec.convert(job.finished["weights"], _Weights)
        job.precision = done.precision
        _check_agreement(job)  # the run that was interrupted may have asked for less
        job.quantised = read_quantised(done.tensors, job.graphs)
        restore_weights(job.models.values(), job.quantised)
        return
    job.watcher.stage("precision", f"{name}, fitted to text that the target writes")
    decoder, advance = job.target.decoder, job.watcher.advance
    job.quantised, job.precision = quantise_target(decoder, _opening(job), name, advance)
    _check_agreement(job)
    if drafter := job.models.get("drafter"):
        job.quantised |= quantise_nearest(drafter, PRECISIONS[name].layers, job.quantised)


def _check_agreement(job: _Job) -> None:
    least = job.request.min_agreement
    if job.precision is not None:
        agreement = PRECISIONS[job.request.precision].agreement
        check_agreement(job.precision, agreement if least is None else least)


def _opening(job: _Job) -> list[int]:
    """What the target's own text begins with: a user's turn, or its first token."""
    text, config = Text.open(job.folder), job.target.config
    first = [config.bos_token_id if config.bos_token_id is not None else config.eos_token_ids[0]]
    if not text.has_template:
        return first
    return find_opening(lambda m: text.encode_chat([{"role": "user", "content": m}]), first)


def _write_weights(job: _Job) -> list[StoredTensor]:
    if "weights" in job.finished:
        return msgspec.convert(job.finished["weights"], _Weights).tensors
    tensors: dict[str, Weight] = dict(_named_weights(job.models.values()))
    tensors |= job.quantised
    total = sum(map(stored_bytes, tensors.values()))
    _check_space(job, total)
    job.watcher.stage("weights", f"{len(tensors)} tensors, {total / 1e6:.0f} MB")
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        job.watcher.advance(done, total)

    stored = write_weights(sorted(tensors.items()), job.graphs, advance)
    sha256 = sha256_file(job.graphs / WEIGHT_FILE)
    _finish(job, "weights", _Weights(stored, sha256, job.precision))
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
            file = f"{role}.{shape_name(sizes)}.onnx"
            if sizes:
                check_graph(graph, file)
            ir.save(graph, job.graphs / file)
            specs.append(graph_spec(file, role, sizes, graph))
            job.watcher.advance(number, len(shapes))
    _finish(job, "graphs", specs)
    return specs


def _sizes(role: Role, plan: ShapePlan) -> list[dict[str, int]]:
    return target_sizes(plan) if role == "target" else drafter_sizes(plan)


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
            feeds = make_feeds(inputs[spec.role], _parity_sizes(spec, job.plan), kind, vocab)
            wanted[spec.file, kind] = torch_outputs(inputs[spec.role], feeds)
        job.watcher.advance(len(wanted), 2 * len(specs))
    _release(job)
    job.watcher.stage("parity", f"{len(specs)} graphs in ONNX Runtime")
    rows: list[ParityRow] = []
    for number, spec in enumerate(specs, start=1):
        sizes = _parity_sizes(spec, job.plan)
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


def _parity_sizes(spec: GraphSpec, plan: ShapePlan) -> dict[str, int]:
    """Sizes a graph is checked at; the symbolic one at a shape that no static graph has."""
    if spec.sizes:
        return spec.sizes
    slots = plan.buckets[0] - 3 if plan.buckets[0] > 8 else plan.buckets[0]
    count = 5
    if spec.role == "target":
        return {"batch": plan.batch, "nodes": count, "slots": slots, "rows": 2}
    return {"batch": plan.batch, "accepted": count, "slots": slots}


def _release(job: _Job) -> None:
    """Drop the weights; names and shapes of the stages are all that is left to use."""
    for model in job.models.values():
        for stage in model.stages:
            stage.module.to("meta")
    gc.collect()  # the tracer leaves cycles that hold parameters


def _write_text(job: _Job) -> None:
    job.watcher.stage("text", "tokenizer, chat template")
    job.target.save_text_files(job.folder)


def _write_reports(job: _Job, rows: Sequence[ParityRow]) -> None:
    folder = job.folder / "reports"
    folder.mkdir(exist_ok=True)
    parity_files(rows, folder)
    if job.precision is not None:
        precision_files(job.precision, folder)


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
        target=target_spec(job.target, job.models["target"]),
        drafter=drafter_spec(job.models.get("drafter")),
        plan=job.plan,
        graphs=tuple(specs),
        tensors=tuple(stored),
        provenance=provenance(job.request, job.target, stored),
        files=hashes,
    )
    write_manifest(job.folder, manifest)
    _build_engine(job)
    check_output(job.request)  # the work took a while: something may stand there by now
    (job.folder / _PROGRESS_FILE).unlink()
    publish_folder(job.folder, output)


def _build_engine(job: _Job) -> None:
    """Put the wanted engine into the bundle before it is published."""
    if job.request.engine == "none":
        return
    bundle = open_bundle(job.folder)
    chosen, why = choose_engine(job.request.engine, bundle)
    if chosen in BUILT:
        build_onnxruntime(bundle, job.watcher)
    else:
        job.watcher.note(f"engine {chosen}: {why}")
