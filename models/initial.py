"""A drafter before training: its blocks are the target's last ones, the rest starts small.

Training starts here. Untrained it proposes next to nothing that the target accepts.
"""

from __future__ import annotations

import torch
from torch import nn

from pspec.models.decoder import Decoder
from pspec.models.drafter import Drafter
from pspec.models.drafter_config import DrafterConfig, check_drafter

_SPREAD = 0.02
"""Standard deviation of weights that have no counterpart in the target."""


def initial_config(target: Decoder, *, slots: int = 5, num_layers: int = 1) -> DrafterConfig:
    """ParallelSpec on EAGLE: three feature boundaries, distinct masks, the target's head."""
    config = target.config
    depth = config.num_layers
    boundaries = tuple(sorted({min(2, depth), depth // 2, max(depth - 3, 1)}))
    return check_drafter(
        DrafterConfig(
            slots=slots,
            features=boundaries,
            mask_feature="slot",
            fuse="concat-fc",
            shift=True,
            target_hidden_size=config.block.hidden_size,
            target_vocab_size=config.vocab_size,
            num_layers=num_layers,
            block=config.block,
            rope=config.rope,
        )
    )


def initial_drafter(target: Decoder, config: DrafterConfig, *, seed: int = 0) -> Drafter:
    """Fill a drafter from the target where shapes agree, with small random numbers elsewhere."""
    drafter = Drafter(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _SPREAD, generator=generator)
    for own, theirs in zip(reversed(drafter.layers), reversed(target.layers), strict=False):
        _copy(own, theirs)
    if config.final_norm:
        drafter.norm.weight.copy_(target.norm.weight)
    return drafter.eval()


def _copy(own: nn.Module, theirs: nn.Module) -> None:
    source = theirs.state_dict()
    for name, tensor in own.state_dict().items():
        if name in source and source[name].shape == tensor.shape:
            tensor.copy_(source[name])
