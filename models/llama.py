"""Llama 2 and 3 and what shares their shape: SmolLM2, TinyLlama, Vicuna, Mistral 7B as GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pspec.models.config import TargetConfig
from pspec.models.family_parts import target_config
from pspec.models.hf_config import flag

MODEL_TYPE = "llama"
GGUF_INTERLEAVED = True
"""llama.cpp stores q and k with the two channels of a rotary pair side by side."""

DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""What transformers assumes where a file is silent."""


def resolve(config: Mapping[str, Any]) -> TargetConfig:
    """Numbers of a ``llama`` config; ``attention_bias`` covers q, k, v and o.

    Raises:
        ConfigError: naming the field at fault.
    """
    config = {**DEFAULTS, **config}
    extra = frozenset({"mlp_bias"})
    return target_config(config, MODEL_TYPE, extra=extra, mlp_bias=flag(config, "mlp_bias"))
