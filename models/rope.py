"""Rotary frequencies, from ONE resolver that reads both spellings of a config.

Old: ``rope_theta`` beside ``rope_scaling`` (``type`` or ``rope_type``). New (transformers 5): all
in ``rope_parameters``; ``rope_scaling`` may be its alias. Where both speak, they must agree.
An absent base is 10000, whatever the model around it uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pspec.errors import ConfigError
from pspec.models.config import Llama3Scaling, RopeConfig
from pspec.models.hf_config import positive_number

DEFAULT_THETA = 10000.0
_LLAMA3_KEYS = Llama3Scaling.__struct_fields__


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each channel pair, ``[D / 2]`` fp64 (Su et al. 2021; Llama 3)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv_freq = config.theta**-exponent
    scaling = config.scaling
    if scaling is None:
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    turns = scaling.original_max_position_embeddings / wavelength
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)
    return inv_freq * ((1 - smooth) / scaling.factor + smooth)


def resolve_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Rotary settings of a Hugging Face config, target's or drafter's, in either spelling.

    Raises:
        ConfigError: a type other than ``default`` and ``llama3``, an unknown or missing key, a
            partial rotation, a setting per layer type, or two spellings that disagree.
    """
    rope = _merged(config)
    kind = rope.pop("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ConfigError(f"rope type {kind!r} is not supported; supported: default, llama3")
    factor = rope.pop("partial_rotary_factor", 1)
    if factor != 1:
        raise ConfigError(f"partial_rotary_factor is {factor!r}; only 1 (whole heads) is supported")
    theta = positive_number(rope.pop("rope_theta", DEFAULT_THETA), "rope_theta")
    unknown = sorted(set(rope) - set(_LLAMA3_KEYS if kind == "llama3" else ()))
    if unknown:
        raise ConfigError(f"rope type {kind!r} does not take {', '.join(unknown)}; remove it")
    return RopeConfig(theta, _llama3(rope) if kind == "llama3" else None)


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every rope setting of the config under its new name; nulls count as absent."""
    merged: dict[str, Any] = {}
    top = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for source, values in (
        ("the top level", top),
        ("rope_scaling", _table(config, "rope_scaling")),
        ("rope_parameters", _table(config, "rope_parameters")),
    ):
        for key, value in values.items():
            if value is None:
                continue
            name = "rope_type" if key == "type" else key
            if merged.setdefault(name, value) != value:
                raise ConfigError(
                    f"{name} is {value!r} in {source} but {merged[name]!r} elsewhere; keep one"
                )
    return merged


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}; expected an object or null")
    nested = [name for name, item in value.items() if isinstance(item, Mapping)]
    if nested:
        raise ConfigError(
            f"{key} differs per layer type ({', '.join(nested)}); only one rope for all layers is "
            "supported"
        )
    return value


def _llama3(rope: Mapping[str, Any]) -> Llama3Scaling:
    missing = [key for key in _LLAMA3_KEYS if key not in rope]
    if missing:
        raise ConfigError(f"rope type 'llama3' needs {', '.join(missing)}")
    factor, low, high, original = (positive_number(rope[key], key) for key in _LLAMA3_KEYS)
    if high <= low:
        raise ConfigError(f"high_freq_factor {high} must be greater than low_freq_factor {low}")
    if original != int(original):
        raise ConfigError(f"original_max_position_embeddings is {original}; expected an integer")
    return Llama3Scaling(factor, low, high, int(original))
