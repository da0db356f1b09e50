"""The ``onnxruntime`` engine of a bundle: its symbolic graphs fused and packed for a CPU.

Written to ``engines/onnxruntime/``: one graph a role, ``weights.data`` with what was re-packed (all
other weights stay in the bundle's own file), and ``engine.json``, the sidecar. Needs onnx-ir and
onnxscript, not torch.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import onnx_ir as ir

import pspec
from pspec.errors import EngineError
from pspec.export.fuse import fuse_graph
from pspec.export.pack import pack_products, set_accuracy
from pspec.export.tensor_spec import tensor_specs
from pspec.files import replaced_folder, sha256_file, write_file
from pspec.progress import Watcher
from pspec.runtime.bundle import GRAPH_FOLDER, Bundle
from pspec.runtime.compare import compare_outputs
from pspec.runtime.engine import Array
from pspec.runtime.fused import (
    ENGINES_FOLDER,
    FORMAT,
    SIDECAR_FILE,
    EngineParity,
    FusedGraph,
    Sidecar,
    cache_slots,
    engine_folder,
)
from pspec.runtime.manifest import FileHash, Role
from pspec.runtime.ort import open_session, ort_errors
from pspec.runtime.probe import FILLINGS, Feeds, probe_feeds
from pspec.runtime.text import Text

ACCURACY_LEVEL = 4
"""Inputs of a quantised product are rounded to 8 bits: several times faster than fp32 inputs."""
TOLERANCE = 1e-2
"""Largest difference from the standard graph on random inputs, over their scale.

Other kernels round otherwise, and random caches enlarge that: 1e-3 was seen on a 30-layer target.
"""
LEAST_AGREEMENT = 0.5
"""Share of a passage's tokens that such rounding must leave: below it something is broken."""
_PASSAGE = """Water boils at a lower temperature on a mountain than at the sea, because the air
presses less on its surface. A pot of rice that takes twenty minutes at home may take half an hour
up there. Cooks who live high above the plains therefore close the lid, which keeps the steam in."""
WEIGHT_FILE = "weights.data"
_OWN_WEIGHTS = "own"
"""Stands for the engine's weight file until it is known where the engine will lie."""
_SPARE = 64
"""Rows of a probe's cache beyond twice the call's: a drafter's mask slots are written as well."""
_INLINE = 1024
"""Bytes up to which a constant stays inside the graph's file."""
_ALIGNMENT = 64


def build_onnxruntime(bundle: Bundle, watcher: Watcher | None = None) -> Path:
    """Build the engine, check it against the standard graphs, and put it into the bundle.

    Returns:
        The engine's folder.

    Raises:
        EngineError: where a graph cannot be fused or does not compute the same.
    """
    watcher = watcher or Watcher()
    output = engine_folder(bundle)
    with replaced_folder(output) as work:
        models = dict(_fuse(bundle, work, watcher))
        parity: list[EngineParity] = []
        for role, model in models.items():
            watcher.stage("check", role)
            parity += _check(bundle, role, model, work)
            _save(model, work / f"{role}.onnx", output)
        sidecar = _describe(bundle, parity, work)
        write_file(work / SIDECAR_FILE, msgspec.json.format(msgspec.json.encode(sidecar), indent=1))
    return output


def _fuse(bundle: Bundle, work: Path, watcher: Watcher) -> Iterator[tuple[Role, ir.Model]]:
    """The fused graph of every role; what was re-packed goes to the engine's weight file."""
    with (work / WEIGHT_FILE).open("wb") as file:
        for role in bundle.manifest.roles:
            watcher.stage("fuse", role)
            graph = _load(bundle.graphs / bundle.manifest.symbolic(role).file)
            model = fuse_graph(graph, cache_slots(bundle.manifest))
            pack_products(model, ACCURACY_LEVEL)
            for value in model.graph.initializers.values():
                value.const_value = _stored(value.const_value, bundle, file)
            yield role, model


def _load(path: Path) -> ir.Model:
    try:
        return ir.load(path)
    except Exception as error:  # protobuf's own errors have no common base class
        raise EngineError(f"{path.name} cannot be read: export again ({error})") from error


def _stored(tensor: ir.TensorProtocol | None, bundle: Bundle, file: IO[bytes]) -> ir.TensorProtocol:
    """The constant by its place below the bundle, where it is large; new ones are written."""
    assert tensor is not None
    if isinstance(tensor, ir.ExternalTensor):
        return _external(tensor, f"{GRAPH_FOLDER}/{tensor.location}", tensor.offset or 0, bundle)
    if tensor.nbytes <= _INLINE:
        return tensor
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    offset = file.tell()
    file.write(tensor.tobytes())
    return _external(tensor, _OWN_WEIGHTS, offset, bundle)


def _external(
    tensor: ir.TensorProtocol, location: str, offset: int, bundle: Bundle
) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        location,
        offset=offset,
        length=tensor.nbytes,
        dtype=tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=str(tensor.name),
        base_dir=bundle.folder,
    )


def _save(model: ir.Model, path: Path, folder: Path) -> None:
    """Write the graph for an engine that lies in ``folder``, its places relative to the bundle."""
    proto = ir.to_proto(model)
    own = f"{ENGINES_FOLDER}/{folder.name}/{WEIGHT_FILE}"
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location" and entry.value == _OWN_WEIGHTS:
                entry.value = own
    path.write_bytes(proto.SerializeToString())


def _check(bundle: Bundle, role: Role, model: ir.Model, work: Path) -> Iterator[EngineParity]:
    """Run the graph beside the standard one at every number of rows of the plan, and on text.

    Raises:
        EngineError: naming the shape.
    """
    whole = bundle.manifest.symbolic(role)
    standard = open_session(bundle.graphs / whole.file, None, prepack=False)
    sessions = []
    for level in (1, ACCURACY_LEVEL):
        set_accuracy(model, level)
        _save(model, work / f"{role}.onnx", work)
        sessions.append(open_session(work / f"{role}.onnx", None, weights=bundle.folder))
    longest = bundle.manifest.plan.max_context
    for graph in bundle.manifest.graphs:
        if graph.role != role or graph.sizes.get("slots") != longest:
            continue
        for filling in FILLINGS:
            feeds = probe_feeds(graph, bundle.manifest.target.vocab_size, filling)
            got, want = fused_outputs(sessions[0], feeds), _outputs(standard, feeds)
            found = compare_outputs(got, want, TOLERANCE)
            if found.faults:
                raise EngineError(f"engine onnxruntime, {graph.file}: {found.faults[0]}")
            yield EngineParity(graph.file, found.error, found.agree)
    if role == "target":
        feeds = _text_feeds(bundle)
        want, got = _outputs(standard, feeds), fused_outputs(sessions[1], feeds)
        apart = float(np.std(got["logits"] - want["logits"]) / np.std(want["logits"]))
        agree = float(np.mean(got["next_token"] == want["next_token"]))
        if not (agree >= LEAST_AGREEMENT and np.isfinite(apart)):
            raise EngineError(
                f"engine onnxruntime: rounded inputs leave {agree:.0%} of tokens on text, expected "
                f"{LEAST_AGREEMENT:.0%}; run the standard graphs with --engine standard"
            )
        yield EngineParity("text", apart, agree)


def _text_feeds(bundle: Bundle) -> Feeds:
    """One call that reads a passage of text, every row wanted."""
    text, manifest = Text.open(bundle.folder), bundle.manifest
    ids = text.encode(_PASSAGE)[: manifest.plan.max_context - 1]
    count, cache = len(ids), manifest.target.cache
    empty = np.zeros((1, cache.heads, 1, cache.size), np.float32)
    rows = np.arange(count, dtype=np.int32)[None]
    return {
        "token_ids": np.array([ids], np.int32),
        "position_ids": rows,
        "tree_mask": np.tri(count, dtype=np.bool_)[None],
        "cache_length": np.zeros(1, np.int32),
        "logit_rows": rows,
        **{f"past_{part}.{n}": empty for part in ("key", "value") for n in range(cache.layers)},
    }


def _outputs(session: Any, feeds: Feeds) -> dict[str, Array]:
    names = [value.name for value in session.get_outputs()]
    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    with ort_errors("onnxruntime cannot run a graph of the engine"):
        return dict(zip(names, session.run(names, given), strict=True))


def fused_outputs(session: Any, feeds: Feeds) -> dict[str, Array]:
    """What the standard graph would give: row by row, new rows taken out of the cache."""
    batch, count = feeds["token_ids"].shape
    rows = []
    for row in range(batch):
        given = {name: array[row : row + 1] for name, array in feeds.items()}
        room = ((0, 0), (0, 0), (0, 2 * count + _SPARE), (0, 0))
        given |= {name: np.pad(a, room) for name, a in given.items() if name.startswith("past_")}
        outputs = _outputs(session, given)
        start = int(given["cache_length"][0])
        for name in [name for name in outputs if name.startswith("present_")]:
            new = outputs.pop(name)[:, :, start : start + count]
            outputs[name.replace("present_", "new_")] = new
        rows.append(outputs)
    return {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}


def _describe(bundle: Bundle, parity: Sequence[EngineParity], work: Path) -> Sidecar:
    graphs = {}
    for role in bundle.manifest.roles:
        model = ir.load(work / f"{role}.onnx")
        inputs, outputs = tensor_specs(model.graph.inputs), tensor_specs(model.graph.outputs)
        graphs[role] = FusedGraph(f"{role}.onnx", _packed_bytes(model), inputs, outputs)
    files = [path for path in sorted(work.iterdir()) if path.name != SIDECAR_FILE]
    return Sidecar(
        format=FORMAT,
        source=bundle.manifest.checksum,
        accuracy_level=ACCURACY_LEVEL,
        graphs=graphs,
        files={path.name: FileHash(path.stat().st_size, sha256_file(path)) for path in files},
        parity=tuple(parity),
        built_with={
            "pspec": pspec.__version__,
            "onnxruntime": version("onnxruntime"),
            "machine": platform.machine(),
            "system": platform.system(),
        },
    )


def _packed_bytes(model: ir.Model) -> int:
    """Of the stored weights of products, which ONNX Runtime lays out anew when it loads them."""
    products = (node for node in model.graph if node.op_type in ("MatMul", "MatMulNBits"))
    weights = {value for node in products for value in node.inputs[1:] if value is not None}
    return sum(value.const_value.nbytes for value in weights if value.const_value is not None)
