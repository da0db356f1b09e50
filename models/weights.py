"""From a checkpoint's tensors to a :class:`~pspec.models.decoder.Decoder`, strict both ways.

Every tensor of the checkpoint is used and every parameter is filled, or loading fails with the
name of the one that is not. Tensors are read in blocks of rows straight into their parameter, so
that the peak is the fp32 weights and one block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from pspec.errors import CheckpointError
from pspec.models.config import TargetConfig
from pspec.models.decoder import Decoder
from pspec.models.layers import Linear

BLOCK_ELEMENTS = 4 << 20
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Tensors of old checkpoints that only repeat the config."""


class TensorSource(Protocol):
    """Tensors under their Hugging Face names, linear weights ``[out, in]``."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def place(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        ...

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor as blocks of consecutive rows, in whatever float type it is stored."""
        ...


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` rows of blocks of about :data:`BLOCK_ELEMENTS` elements."""
    rows = shape[0]
    per_row = max(1, torch.Size(shape[1:]).numel())
    step = max(1, BLOCK_ELEMENTS // per_row)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def load_decoder(config: TargetConfig, source: TensorSource) -> Decoder:
    """A decoder in fp32, eval mode, without gradients.

    Its ``config`` says ``tied_head: false`` if the checkpoint has a head that differs from the
    embedding, whatever the flag in ``config.json``, as transformers does.

    Raises:
        CheckpointError: a tensor is missing, left over, of another shape, or not finite.
    """
    config = _settle_head(config, source)
    if config.num_layers > max(len(source.shapes), 1):  # before as many modules are made
        raise CheckpointError(
            f"the config says {config.num_layers} layers, the checkpoint holds "
            f"{len(source.shapes)} tensors in all"
        )
    with torch.device("meta"):
        decoder = Decoder(config)
    parameters = _parameters(decoder)
    _check(parameters, config, source)
    state = {name: _read(source, wanted) for name, wanted in parameters.items()}
    decoder.load_state_dict(state, assign=True)
    return decoder.requires_grad_(False).eval()


@dataclass(frozen=True)
class _Wanted:
    """A tensor to read: its name and shape in the checkpoint, and whether we keep it transposed."""

    name: str
    shape: tuple[int, ...]
    transposed: bool


def _parameters(decoder: Decoder) -> dict[str, _Wanted]:
    modules = decoder.named_modules()
    linear = {f"{name}.weight" for name, module in modules if isinstance(module, Linear)}
    wanted = {}
    for name, parameter in decoder.named_parameters():
        shape = tuple(parameter.shape)
        transposed = name in linear
        foreign = name if name == HEAD else f"model.{name}"
        wanted[name] = _Wanted(foreign, shape[::-1] if transposed else shape, transposed)
    return wanted


def _settle_head(config: TargetConfig, source: TensorSource) -> TargetConfig:
    shape = (config.vocab_size, config.block.hidden_size)
    both = source.shapes.get(HEAD) == source.shapes.get(EMBEDDING) == shape
    if config.tied_head and both and not _equal(source, HEAD, EMBEDDING):
        return replace(config, tied_head=False)
    return config


def _equal(source: TensorSource, one: str, other: str) -> bool:
    pairs = zip_longest(source.blocks(one), source.blocks(other))
    return all(torch.equal(a.float(), b.float()) for a, b in pairs)


def _check(parameters: Mapping[str, _Wanted], config: TargetConfig, source: TensorSource) -> None:
    wanted = {item.name: item for item in parameters.values()}
    missing = [name for name in wanted if name not in source.shapes]
    if missing:
        raise CheckpointError(_missing_message(missing))
    for name, item in wanted.items():
        found = source.shapes[name]
        if found != item.shape:
            raise CheckpointError(
                f"{source.place(name)}: {name} has shape {list(found)}, expected {list(item.shape)}"
            )
    # A tied head of the right shape was found equal to the embedding before.
    right = source.shapes.get(HEAD) == source.shapes[EMBEDDING]
    used = {*wanted, HEAD} if config.tied_head and right else set(wanted)
    left = sorted(n for n in source.shapes if n not in used and not _DERIVED.fullmatch(n))
    if left:
        raise CheckpointError(
            f"{source.place(left[0])}: {_named(left)} would be ignored: config.json describes a "
            f"{config.family} model without it"
        )


def _missing_message(missing: list[str]) -> str:
    if missing == [HEAD]:
        return (
            f"{HEAD} is missing and tie_word_embeddings is false; add the tensor, or set the flag "
            "if the head is the embedding"
        )
    return f"{_named(missing)} is missing; download the checkpoint again or correct its config.json"


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _read(source: TensorSource, wanted: _Wanted) -> Tensor:
    shape = wanted.shape[::-1] if wanted.transposed else wanted.shape
    result = torch.empty(shape, dtype=torch.float32)
    rows = result.t() if wanted.transposed else result
    start = 0
    for block in source.blocks(wanted.name):
        # The sum is the cheap test: it is finite only if every element is.
        if not (torch.isfinite(block.sum()) or torch.isfinite(block).all()):
            place = source.place(wanted.name)
            raise CheckpointError(f"{place}: {wanted.name} holds NaN or infinite values")
        # Transposing first, in the narrow type, is twice as fast as leaving it to the copy.
        piece = block.t().contiguous().t() if wanted.transposed else block
        rows[start : start + len(block)].copy_(piece)
        start += len(block)
    return result
