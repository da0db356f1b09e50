"""What every decoder family of the Llama kind has in common: one config to one set of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pspec.errors import ConfigError
from pspec.models.config import Activation, BlockConfig, TargetConfig
from pspec.models.hf_config import (
    flag,
    positive_int,
    positive_number,
    refuse_unsupported,
    token_ids,
)
from pspec.models.rope import resolve_rope

_USED = """
attention_bias bos_token_id eos_token_id head_dim hidden_act hidden_activation hidden_size
intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
num_key_value_heads partial_rotary_factor rms_norm_eps rope_parameters rope_scaling rope_theta
tie_word_embeddings vocab_size
"""
USED = frozenset(_USED.split())
"""Fields that :func:`target_config` reads."""

ACTIVATION_NAMES: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
"""Hugging Face's name to ours; ``gelu_new`` is the tanh formula under its older name."""


def target_config(
    config: Mapping[str, Any],
    family: str,
    *,
    extra: frozenset[str] = frozenset(),
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> TargetConfig:
    """Resolve a config whose absent fields already have the family's defaults.

    Args:
        config: ``config.json``; null counts as absent.
        family: its ``model_type``.
        extra: fields the family reads by itself.
        mlp_bias: gate, up and down projections have biases.
        qk_norm: heads of q and k are normed before they are rotated.

    Raises:
        ConfigError: naming the field that is missing, wrong, unknown or unsupported.
    """
    refuse_unsupported(config, USED | extra)
    bias = flag(config, "attention_bias")
    vocab_size = positive_int(config, "vocab_size")
    block = BlockConfig(
        hidden_size=positive_int(config, "hidden_size"),
        intermediate_size=positive_int(config, "intermediate_size"),
        **_heads(config),
        norm_eps=positive_number(config.get("rms_norm_eps"), "rms_norm_eps"),
        activation=_activation(config),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
    bos = token_ids(config.get("bos_token_id"), "bos_token_id")
    target = TargetConfig(
        family=family,
        vocab_size=vocab_size,
        num_layers=positive_int(config, "num_hidden_layers"),
        block=block,
        rope=resolve_rope(config),
        tied_head=flag(config, "tie_word_embeddings"),
        max_positions=positive_int(config, "max_position_embeddings"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(config.get("eos_token_id"), "eos_token_id"),
    )
    return check_token_ids(target)


def check_token_ids(target: TargetConfig) -> TargetConfig:
    """Return ``target`` unless a special token lies outside its vocabulary.

    Raises:
        ConfigError: naming the id and the size.
    """
    named = [("eos_token_id", token) for token in target.eos_token_ids]
    if target.bos_token_id is not None:
        named.append(("bos_token_id", target.bos_token_id))
    for key, token in named:
        if token >= target.vocab_size:
            raise ConfigError(f"{key} {token} is not below vocab_size {target.vocab_size}")
    return target


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    heads = positive_int(config, "num_attention_heads")
    grouped = config.get("num_key_value_heads") is not None
    kv_heads = positive_int(config, "num_key_value_heads") if grouped else heads
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _head_dim(config, heads),
    }


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    if config.get("head_dim") is not None:
        size = positive_int(config, "head_dim")
    else:
        hidden = positive_int(config, "hidden_size")
        if hidden % heads:
            raise ConfigError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there "
                "is no head_dim"
            )
        size = hidden // heads
    if size % 2:
        raise ConfigError(f"head_dim {size} is odd; rotary positions turn channels in pairs")
    return size


def _activation(config: Mapping[str, Any]) -> Activation:
    names = {config.get(key) for key in ("hidden_act", "hidden_activation")} - {None}
    if len(names) > 1:
        raise ConfigError(
            f"hidden_act {config['hidden_act']!r} and hidden_activation "
            f"{config['hidden_activation']!r} disagree; keep one"
        )
    name = str(names.pop()) if names else "silu"
    if name not in ACTIVATION_NAMES:
        raise ConfigError(
            f"hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATION_NAMES)}"
        )
    return ACTIVATION_NAMES[name]
