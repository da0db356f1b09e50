"""What a manifest says: of graphs, target and drafter, and of where they come from."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import msgspec
import onnx_ir as ir

import pspec
from pspec.export.request import ExportRequest
from pspec.export.tensor_spec import tensor_specs
from pspec.export.weights import unique_bytes
from pspec.models.checkpoint import LoadedTarget
from pspec.models.decoder import TargetGraph
from pspec.models.drafter_file import drafter_fingerprint
from pspec.models.drafter_graph import DrafterGraph
from pspec.models.graph import GraphModel
from pspec.runtime.manifest import (
    CacheSpec,
    GraphSpec,
    ParallelSpec,
    Role,
    ShapePlan,
    StoredTensor,
    TargetSpec,
)


def shape_name(sizes: dict[str, int]) -> str:
    """The middle of a graph's file name."""
    if not sizes:
        return "symbolic"
    count = sizes.get("nodes") or sizes["accepted"]
    return f"{'n' if 'nodes' in sizes else 'a'}{count}.s{sizes['slots']}"


def graph_spec(file: str, role: Role, sizes: dict[str, int], graph: ir.Model) -> GraphSpec:
    """What a manifest says of a graph."""
    inputs, outputs = tensor_specs(graph.graph.inputs), tensor_specs(graph.graph.outputs)
    return GraphSpec(file, role, sizes, inputs, outputs)


def target_name(target: LoadedTarget) -> str:
    """What people call the target: the last part of a folder, file or hub id."""
    return Path(target.source).name.removesuffix(".gguf")


def target_spec(target: LoadedTarget, model: GraphModel) -> TargetSpec:
    """The runtime's view of the target."""
    config = target.config
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


def drafter_spec(model: GraphModel | None) -> ParallelSpec | None:
    """The runtime's view of the drafter, if there is one."""
    if model is None:
        return None
    assert isinstance(model, DrafterGraph)
    config = model.config
    block = config.block
    return ParallelSpec(
        slots=config.slots,
        candidates=model.candidates,
        shift=config.shift,
        feature_size=config.feature_size,
        cache=CacheSpec(config.num_layers, block.num_key_value_heads, block.head_dim),
        config=msgspec.to_builtins(config),
    )


def provenance(
    request: ExportRequest, target: LoadedTarget, stored: Sequence[StoredTensor]
) -> dict[str, str]:
    """What made the bundle, and from what."""
    return {
        **_versions(),
        "target_fingerprint": target.fingerprint,
        "drafter_fingerprint": _drafter_key(request),
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


def export_key(request: ExportRequest, target: LoadedTarget, plan: ShapePlan) -> str:
    """Hash of everything that decides what an export writes; equal keys may resume each other."""
    parts = [
        repr(_versions()),
        target.fingerprint,
        _drafter_key(request),
        request.precision,
        request.platform,
        repr(plan),
    ]
    return sha256("\n".join(parts).encode()).hexdigest()
