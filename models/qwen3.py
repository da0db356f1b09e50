"""Qwen3, dense: q and k are normed per head, and MLPs have no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pspec.errors import ConfigError
from pspec.models.config import TargetConfig
from pspec.models.family_parts import target_config
from pspec.models.hf_config import flag

MODEL_TYPE = "qwen3"
GGUF_INTERLEAVED = False

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}
"""What transformers assumes where a file is silent."""


def resolve(config: Mapping[str, Any]) -> TargetConfig:
    """Numbers of a ``qwen3`` config; ``attention_bias`` covers q, k, v and o.

    Raises:
        ConfigError: naming the field at fault.
    """
    config = {**DEFAULTS, **config}
    # A window's size and first layer stand in every Qwen3 config; only the switch turns it on.
    if flag(config, "use_sliding_window"):
        raise ConfigError("use_sliding_window is true; only full attention is supported")
    extra = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})
    return target_config(config, MODEL_TYPE, extra=extra, qk_norm=True)
