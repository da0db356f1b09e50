"""The target: a decoder-only model that verifies a token tree against a cache it does not own.

Graph (B, R, N, S symbolic; ``l`` is a layer):

================== =================== ======= ==============================================
input              shape               type    meaning
================== =================== ======= ==============================================
token_ids          [B, N]              int32   node 0 is the last committed token
position_ids       [B, N]              int32   cache length + depth of the node
tree_mask          [B, N, N]           bool    [q, k]: k is q or an ancestor of q
cache_length       [B]                 int32   rows of the cache that count
logit_rows         [B, R]              int32   nodes whose logits are wanted
past_key.l         [B, Hkv, S, D]      float   and past_value.l
================== =================== ======= ==============================================

================== =================== ======= ==============================================
output             shape               type    meaning
================== =================== ======= ==============================================
next_token         [B, R]              int32   argmax of logits, the lowest id among equals
logits             [B, R, V]           float
feature            [B, N, F]           float   hidden states at the boundaries, concatenated
new_key.l          [B, Hkv, N, D]      float   and new_value.l: rows of the nodes
================== =================== ======= ==============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pspec.models.config import TargetConfig
from pspec.models.graph import Stage, Value
from pspec.models.layers import Block, Linear, RMSNorm, RopeTable
from pspec.models.rope import inverse_frequencies

Features = Literal["last"] | tuple[int, ...]
"""``last``: post-final-norm state; else boundaries in HF ``hidden_states`` numbering, 0..layers."""


class Decoder(nn.Module):
    """Parameters of a target, named as in Hugging Face checkpoints without the ``model.`` prefix.

    Linear weights are ``[in, out]``. A tied head has no parameter of its own.
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        block = config.block
        self.embed_tokens = nn.Embedding(config.vocab_size, block.hidden_size)
        self.layers = nn.ModuleList(Block(block) for _ in range(config.num_layers))
        self.norm = RMSNorm(block.hidden_size, block.norm_eps)
        self.lm_head = None if config.tied_head else Linear(block.hidden_size, config.vocab_size)


class Prologue(nn.Module):
    """Token embeddings, rotary rows and the visibility mask, once for all layers."""

    def __init__(self, embed: nn.Embedding, rope: RopeTable, group: int) -> None:
        super().__init__()
        self.embed = embed
        self.rope = rope
        self.group = group

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        cache_length: Tensor,
        past_key: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = functional.embedding(token_ids, self.embed.weight)
        cos, sin = self.rope(position_ids)
        return hidden, cos, sin, tree_visibility(tree_mask, cache_length, past_key, self.group)


def tree_visibility(
    tree_mask: Tensor, cache_length: Tensor, past_key: Tensor, group: int
) -> Tensor:
    """``[B, 1, G * N, S + N]``: the filled cache and each node's ancestors, tiled per group."""
    batch, nodes, _ = tree_mask.shape
    slots = past_key.shape[2]
    slot = torch.arange(slots, dtype=torch.int32)
    past = (slot[None, :] < cache_length[:, None])[:, None, :].expand(batch, nodes, slots)
    visible = torch.cat((past, tree_mask), dim=-1)
    return torch.cat([visible] * group, dim=1).unsqueeze(1)


class Head(nn.Module):
    """Final norm, and logits of the wanted rows only."""

    def __init__(self, norm: RMSNorm, lm_head: Linear | None, embed: nn.Embedding) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.embed = None if lm_head is not None else embed

    def forward(self, hidden: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.norm(hidden)
        rows = pick_rows(normed, logit_rows)
        if self.lm_head is not None:
            logits = self.lm_head(rows)
        else:
            assert self.embed is not None
            logits = torch.matmul(rows, self.embed.weight.transpose(0, 1))
        return torch.argmax(logits, dim=-1).to(torch.int32), logits, normed


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x[B, N, H]`` at ``rows[B, R]``, by one Gather (TensorRT's GatherND rejects int32)."""
    batch, nodes, size = x.shape
    start = torch.arange(batch, dtype=torch.int32)[:, None] * nodes
    return functional.embedding(start.to(torch.int32) + rows, x.reshape(-1, size))


class Join(nn.Module):
    """Concatenate the feature boundaries along the channels."""

    def forward(self, *states: Tensor) -> Tensor:
        return torch.cat(states, dim=-1)


class TargetGraph:
    """A :class:`~pspec.models.graph.GraphModel` over a decoder."""

    dims = ("batch", "nodes", "slots", "rows")

    def __init__(
        self,
        decoder: Decoder,
        *,
        positions: int,
        features: Features = (),
    ) -> None:
        self.decoder = decoder
        self.features = features
        block = decoder.config.block
        self.rope = RopeTable(inverse_frequencies(decoder.config.rope, block.head_dim), positions)

    @property
    def feature_size(self) -> int:
        boundaries = 1 if self.features == "last" else len(self.features)
        return boundaries * self.decoder.config.block.hidden_size

    @cached_property
    def inputs(self) -> Sequence[Value]:
        config = self.decoder.config
        b = "batch"
        fixed = [
            Value("token_ids", (b, "nodes"), "int32", "node 0 is the last committed token"),
            Value("position_ids", (b, "nodes"), "int32", "cache length + depth"),
            Value("tree_mask", (b, "nodes", "nodes"), "bool", "ancestor or self"),
            Value("cache_length", (b,), "int32", "rows of the cache that count"),
            Value("logit_rows", (b, "rows"), "int32", "nodes whose logits are wanted"),
        ]
        return fixed + cache_values("past", config.num_layers, self._cache_shape("slots"))

    @cached_property
    def outputs(self) -> Sequence[Value]:
        config = self.decoder.config
        b = "batch"
        fixed = [
            Value("next_token", (b, "rows"), "int32", "argmax, lowest id among equals"),
            Value("logits", (b, "rows", config.vocab_size), "float32"),
        ]
        if self.features:
            fixed.append(Value("feature", (b, "nodes", self.feature_size), "float32"))
        return fixed + cache_values("new", config.num_layers, self._cache_shape("nodes"))

    def _cache_shape(self, rows: str) -> tuple[int | str, ...]:
        block = self.decoder.config.block
        return ("batch", block.num_key_value_heads, rows, block.head_dim)

    def value(self, name: str) -> Value:
        block = self.decoder.config.block
        b, group = "batch", block.num_attention_heads // block.num_key_value_heads
        inner = {
            "cos": Value("cos", (b, 1, "nodes", block.head_dim), "float32"),
            "sin": Value("sin", (b, 1, "nodes", block.head_dim), "float32"),
            "visible": Value("visible", (b, 1, _times(group, "nodes"), "slots + nodes"), "bool"),
        }
        known = {v.name: v for v in (*self.inputs, *self.outputs)} | inner
        return known.get(name) or Value(name, (b, "nodes", block.hidden_size), "float32")

    @cached_property
    def stages(self) -> Sequence[Stage]:
        model, config = self.decoder, self.decoder.config
        group = config.block.num_attention_heads // config.block.num_key_value_heads
        embed = "embed_tokens.weight"
        prologue = Stage(
            "embed",
            "prologue",
            Prologue(model.embed_tokens, self.rope, group),
            ("token_ids", "position_ids", "tree_mask", "cache_length", "past_key.0"),
            ("hidden.0", "cos", "sin", "visible"),
            {"embed.weight": embed, "rope.cos": "rope.cos", "rope.sin": "rope.sin"},
        )
        blocks = [block_stage(f"layers.{i}", layer, i) for i, layer in enumerate(model.layers)]
        weights = {"norm.weight": "norm.weight"}
        weights |= (
            {"embed.weight": embed} if config.tied_head else {"lm_head.weight": "lm_head.weight"}
        )
        head = Stage(
            "head",
            "head",
            Head(model.norm, model.lm_head, model.embed_tokens),
            (f"hidden.{config.num_layers}", "logit_rows"),
            ("next_token", "logits", "feature" if self.features == "last" else "normed"),
            weights,
        )
        stages = [prologue, *blocks, head]
        if isinstance(self.features, tuple) and self.features:
            boundaries = tuple(f"hidden.{i}" for i in self.features)
            stages.append(Stage("feature", "feature", Join(), boundaries, ("feature",), {}))
        return stages


def block_stage(name: str, block: nn.Module, layer: int, *, prefix: str = "") -> Stage:
    """The stage of decoder block number ``layer``; its weights keep their checkpoint names."""
    return Stage(
        name,
        "block",
        block,
        (f"hidden.{layer}", "cos", "sin", "visible", f"past_key.{layer}", f"past_value.{layer}"),
        (f"hidden.{layer + 1}", f"new_key.{layer}", f"new_value.{layer}"),
        {key: f"{prefix}{name}.{key}" for key in block.state_dict()},
    )


def cache_values(kind: str, layers: int, shape: tuple[int | str, ...]) -> list[Value]:
    """Key and value tensors of every layer, ``kind`` being ``past`` or ``new``."""
    parts = [(layer, part) for layer in range(layers) for part in ("key", "value")]
    return [Value(f"{kind}_{part}.{layer}", shape, "float32") for layer, part in parts]


def _times(factor: int, dim: str) -> str:
    return dim if factor == 1 else f"{factor}*{dim}"
