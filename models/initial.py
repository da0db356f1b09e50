"""A drafter before training: its blocks are the target's last ones, the rest starts small.

Training starts here. Untrained it proposes next to nothing that the target accepts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

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
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(config.head_size))
    ends = {k: v for k, v in target.state_dict().items() if not k.startswith("layers.")}
    _copy(drafter, {"lm_head.weight": target.embed_tokens.weight.T} | ends)
    for own, theirs in zip(reversed(drafter.layers), reversed(target.layers), strict=False):
        _copy(own, theirs.state_dict())
    return drafter.eval()


def _copy(own: nn.Module, source: Mapping[str, Tensor]) -> None:
    for name, tensor in own.state_dict().items():
        if name in source and source[name].shape == tensor.shape:
            tensor.copy_(source[name])
