"""Tiny exported bundles for tests: a re-randomised target of each family with a random drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pspec.export import pipeline
from pspec.export.request import ExportRequest
from pspec.models.checkpoint import load_target
from pspec.models.drafter import Drafter
from pspec.models.drafter_config import DrafterConfig, check_drafter
from pspec.models.drafter_file import write_drafter
from pspec.models.initial import initial_config
from pspec.progress import Watcher
from tiny import make_hf
from traces import trace_stages_once


@dataclass(frozen=True)
class TinyBundle:
    """An exported bundle and what it was made from."""

    folder: Path
    hf_model: Any
    target_folder: Path
    drafter_folder: Path


def random_drafter(config: DrafterConfig, seed: int = 7) -> Drafter:
    """Every parameter random and large enough to matter (see the re-randomising recipe)."""
    drafter = Drafter(check_drafter(config)).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        parameter.normal_(0.0, 0.15, generator=generator)
        if name.endswith("norm.weight"):
            parameter.add_(1.0)
    if drafter.d2t is not None:
        order = torch.randperm(config.target_vocab_size, generator=generator)
        drafter.d2t.copy_(order[: config.head_size])
    return drafter.eval()


def tiny_bundle(
    folder: Path,
    family: str = "llama",
    *,
    drafter: dict[str, Any] | None = None,
    positions: int = 256,
    head_dim: int = 24,
    **request: Any,
) -> TinyBundle:
    """Export a tiny target of ``family`` and a random drafter.

    ``drafter`` overrides fields of the default drafter config, ``request`` those of the export.
    """
    hf_model, target_folder = make_hf(
        family, folder / "target", max_position_embeddings=positions, head_dim=head_dim
    )
    target = load_target(str(target_folder))
    base = initial_config(target.decoder, slots=4)
    config = DrafterConfig(
        **{name: getattr(base, name) for name in base.__struct_fields__} | (drafter or {})
    )
    write_drafter(random_drafter(config), folder / "drafter")
    options: dict[str, Any] = {"max_context": 96, "nodes": 8} | request
    bundle = export_once(target_folder, folder / "bundle", folder / "drafter", **options)
    return TinyBundle(bundle, hf_model, target_folder, folder / "drafter")


def export_once(
    target: Path,
    output: Path,
    drafter: Path | None = None,
    watcher: Watcher | None = None,
    **options: Any,
) -> Path:
    """Export, with stages that were traced before in this session."""
    request = ExportRequest(target=str(target), output=output, drafter=drafter, **options)
    with mock.patch.object(pipeline, "trace_stages", trace_stages_once):
        return pipeline.export_bundle(request, watcher)
