"""Traced tiny models and their frozen graphs, without the export pipeline around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
import torch

from bundles import random_drafter
from pspec.export.assemble import assemble_graph
from pspec.export.plan import drafter_sizes, target_sizes
from pspec.export.trace import TracedStage, trace_stages
from pspec.export.weights import WEIGHT_FILE, external_tensors, write_weights
from pspec.models.checkpoint import load_target
from pspec.models.decoder import Decoder, TargetGraph
from pspec.models.drafter_config import DrafterConfig
from pspec.models.drafter_graph import DrafterGraph
from pspec.models.graph import GraphModel
from pspec.models.initial import initial_config
from pspec.runtime.manifest import ShapePlan, StoredTensor
from tiny import make_hf

BUCKETS = (24, 40)
NODES, ACCEPTED, CHUNK = 6, 5, 16


@dataclass(frozen=True)
class Graph:
    """One frozen graph on disk."""

    role: str
    sizes: dict[str, int]
    path: Path


@dataclass(frozen=True)
class Traced:
    """A target and a drafter: modules, traces, weights and every frozen graph of two buckets."""

    folder: Path
    hf_model: Any
    decoder: Decoder
    models: dict[str, GraphModel]
    traces: dict[str, dict[str, TracedStage]]
    stored: list[StoredTensor]
    graphs: list[Graph]

    def freeze(self, role: str, sizes: Mapping[str, int], folder: Path | None = None) -> ir.Model:
        """A graph of other sizes; its weights lie in ``folder``."""
        tensors = external_tensors(self.stored, folder or self.folder)
        return assemble_graph(self.models[role], self.traces[role], tensors, sizes, role)

    def graph(self, role: str, **sizes: int) -> Graph:
        """The frozen graph of these sizes."""
        return next(g for g in self.graphs if g.role == role and sizes.items() <= g.sizes.items())


def trace_tiny(
    folder: Path,
    family: str,
    *,
    batch: int = 1,
    features: str | tuple[int, ...] = (1, 2),
    drafter: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Traced:
    """Trace a tiny target of ``family`` (``overrides``: its config) and a random drafter."""
    hf_model, target_folder = make_hf(family, folder / "target", **overrides)
    decoder = load_target(str(target_folder)).decoder
    fields = msgspec.structs.asdict(initial_config(decoder, slots=4))
    fields |= {"features": features, **(drafter or {})}
    config = DrafterConfig(**fields)
    positions = BUCKETS[-1]
    models: dict[str, GraphModel] = {
        "target": TargetGraph(decoder, positions=positions, features=features),  # type: ignore[arg-type]
        "drafter": DrafterGraph(random_drafter(config), decoder, positions=positions),
    }
    traces = {role: trace_stages(model) for role, model in models.items()}
    place = folder / "graphs"
    place.mkdir()
    stored = write_weights(sorted(weights_of(models.values()).items()), place)
    traced = Traced(place, hf_model, decoder, models, traces, stored, [])
    plan = ShapePlan(batch, NODES, ACCEPTED, CHUNK, BUCKETS)
    for role, sizes in (("target", target_sizes(plan)), ("drafter", drafter_sizes(plan))):
        traced.graphs.extend(save_graph(traced, role, each) for each in sizes)
    return traced


def weights_of(models: Sequence[GraphModel] | Any) -> dict[str, torch.Tensor]:
    """Every tensor of the models under its name in the weight file."""
    stages = [stage for model in models for stage in model.stages]
    return {
        stored: stage.module.state_dict()[name]
        for stage in stages
        for name, stored in stage.weights.items()
    }


def save_graph(
    traced: Traced, role: str, sizes: dict[str, int], folder: Path | None = None
) -> Graph:
    """Freeze and save beside the weights."""
    place = folder or traced.folder
    path = place / f"{role}.{'.'.join(f'{k}{v}' for k, v in sizes.items()) or 'symbolic'}.onnx"
    ir.save(traced.freeze(role, sizes, place), path)
    return Graph(role, sizes, path)


def copy_with_weights(
    traced: Traced, folder: Path, graph: Graph, change: Mapping[str, torch.Tensor]
) -> Path:
    """The same graph in another folder, over changed weights."""
    folder.mkdir()
    tensors = weights_of(traced.models.values()) | dict(change)
    stored = write_weights(sorted(tensors.items()), folder)
    assert (folder / WEIGHT_FILE).exists()
    model = traced.models[graph.role]
    tensors_on_disk = external_tensors(stored, folder)
    frozen = assemble_graph(
        model, traced.traces[graph.role], tensors_on_disk, graph.sizes, graph.role
    )
    ir.save(frozen, folder / graph.path.name)
    return folder / graph.path.name
