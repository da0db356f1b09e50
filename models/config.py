"""What a model is, resolved: every number a graph needs, and nothing that is still a guess.

Families turn a checkpoint's ``config.json`` into a :class:`TargetConfig`; a drafter's file holds a
:class:`BlockConfig` of its own. Both are validated where they are read, never later.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


class Llama3Scaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frequency-dependent stretch of Llama 3 (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class RopeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rotary position embedding: base and, for ``llama3``, its scaling."""

    theta: float = 10000.0
    scaling: Llama3Scaling | None = None


class BlockConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decoder block: pre-norm grouped-query attention and a gated MLP."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class TargetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only language model, as the graphs see it."""

    family: str
    vocab_size: int
    num_layers: int
    block: BlockConfig
    rope: RopeConfig
    tied_head: bool
    max_positions: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
