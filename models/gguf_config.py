"""The facts of ``config.json``, from the metadata of a GGUF file.

Every key of the architecture is understood or refused; the resulting config then goes through the
same resolver as one from a Hugging Face folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pspec.errors import CheckpointError, ConfigError
from pspec.models.config import Llama3Scaling, RopeConfig
from pspec.models.rope import DEFAULT_THETA, inverse_frequencies

FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_local_experts",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
}
"""Metadata key, without its architecture, to the field of ``config.json``."""

_DERIVED = {"vocab_size"}
"""Keys that repeat the shape of a tensor."""


def config_from_metadata(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``config.json``; those that only the tensors tell are left to the caller.

    Args:
        architecture: ``general.architecture``.
        metadata: all keys of the file but its vocabulary.

    Raises:
        ConfigError: a key of the architecture that is not understood.
    """
    prefix = f"{architecture}."
    values = {key[len(prefix) :]: v for key, v in metadata.items() if key.startswith(prefix)}
    config = {field: values.pop(key) for key, field in FIELDS.items() if key in values}
    config |= {"model_type": architecture, "head_dim": _head_dim(values, config)}
    scaling = _scaling(values)
    if scaling is not None:
        config["rope_scaling"] = scaling
    unknown = sorted(values.keys() - _DERIVED)
    if unknown:
        raise ConfigError(
            f"unknown GGUF key {', '.join(prefix + key for key in unknown)}: it might change the "
            "computation"
        )
    return config


def _head_dim(values: dict[str, Any], config: Mapping[str, Any]) -> int | None:
    """Size of a head, null for hidden size / heads; takes the keys that must agree with it."""
    rotated = values.pop("rope.dimension_count", None)
    size: int | None = config.get("head_dim", rotated)
    for key, value in (
        ("rope.dimension_count", rotated),
        ("attention.value_length", values.pop("attention.value_length", None)),
    ):
        if value not in (None, size):
            raise ConfigError(f"GGUF key {key} is {value}; only the size of a head, {size}, works")
    return size


def _scaling(values: dict[str, Any]) -> dict[str, Any] | None:
    """Take ``rope.scaling.*``; llama.cpp reads a factor without a type as linear."""
    keys = [key for key in values if key.startswith("rope.scaling.")]
    scaling = {key.removeprefix("rope.scaling."): values.pop(key) for key in keys}
    kind = scaling.get("type", "linear")
    idle = kind == "none" or (kind == "linear" and scaling.get("factor", 1) in (0, 1))
    return None if idle else {"rope_type": kind}


def llama3_scaling(factors: Tensor, theta: float | None) -> dict[str, Any]:
    """``rope_scaling`` of Llama 3.1 and later, recovered from a file's ``rope_freqs``.

    Args:
        factors: ``[D / 2]``, by which each channel pair is slowed down.
        theta: base of the rotation; null for the default.

    Raises:
        CheckpointError: the factors are not those of Llama 3's formula.
    """
    scaling = Llama3Scaling(round(float(factors.max()), 4), 1.0, 4.0, 8192)
    base = DEFAULT_THETA if theta is None else theta
    size = 2 * len(factors)
    plain = inverse_frequencies(RopeConfig(base), size)
    scaled = inverse_frequencies(RopeConfig(base, scaling), size)
    if not torch.allclose(plain / scaled, factors.double(), rtol=1e-4, atol=0):
        raise CheckpointError("rope_freqs.weight is not the scaling of Llama 3; nothing else works")
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
