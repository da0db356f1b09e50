from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pspec.errors import ConfigError
from pspec.models.config import Llama3Scaling, RopeConfig
from pspec.models.rope import inverse_frequencies, resolve_rope
from tiny import LLAMA3_ROPE

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": None, "rope_scaling": None}, RopeConfig(10000.0)),
        ({"rope_theta": 500000}, RopeConfig(500000.0)),
        ({"rope_theta": 500000, "rope_scaling": {}}, RopeConfig(500000.0)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_type": None, "rope_theta": 1e6}}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_type": "default"}}, RopeConfig(10000.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}},
            RopeConfig(5e5, LLAMA3),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}},
            RopeConfig(5e5, LLAMA3),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}},
            RopeConfig(5e5, LLAMA3),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"type": "llama3", "rope_type": "llama3", **SCALING},
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING},
            },
            RopeConfig(5e5, LLAMA3),
        ),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, RopeConfig(10000.0)),
        ({"partial_rotary_factor": 1}, RopeConfig(10000.0)),
    ],
)
def test_both_spellings_resolve(config: dict[str, Any], expected: RopeConfig) -> None:
    assert resolve_rope(config) == expected


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "proportional", 7])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_other_types_are_refused_by_name(field: str, kind: object) -> None:
    with pytest.raises(ConfigError, match=f"{kind!r} is not supported.*default, llama3"):
        resolve_rope({field: {"rope_type": kind, "factor": 4.0}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "beta_fast": 32}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor"),
        ({"rope_scaling": {"type": "llama3", **SCALING, "mscale": 1}}, "mscale"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_scaling": {"type": "llama3", **SCALING, "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "llama3", **SCALING, "factor": True}}, "factor is True"),
        ({"rope_scaling": {"type": "llama3", **SCALING, "high_freq_factor": 1}}, "greater than"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    **SCALING,
                    "original_max_position_embeddings": 8192.5,
                }
            },
            "expected an integer",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_scaling": 4}, "rope_scaling is 4"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
            "full_attention, sliding_attention",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0"),
        ({"rope_scaling": {"type": "default", "rope_type": "llama3"}}, "rope_type is 'llama3'"),
        (
            {"rope_scaling": {"type": "llama3"}, "rope_parameters": {"rope_type": "default"}},
            "rope_type is 'default' in rope_parameters but 'llama3'",
        ),
    ],
)
def test_refusals_name_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_rope(config)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 5e5}, LLAMA3_ROPE])
@pytest.mark.parametrize("size", [24, 64])
def test_frequencies_equal_transformers(rope: dict[str, Any], size: int) -> None:
    config = LlamaConfig(head_dim=size, rope_parameters=dict(rope))
    expected = LlamaRotaryEmbedding(config).inv_freq.double()

    found = inverse_frequencies(resolve_rope({"rope_parameters": rope}), size)

    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_llama3_scaling_changes_the_slow_channels() -> None:
    plain = inverse_frequencies(RopeConfig(1e4), 64)
    scaled = inverse_frequencies(resolve_rope({"rope_parameters": LLAMA3_ROPE}), 64)

    assert scaled[0] == plain[0]
    assert scaled[-1] == plain[-1] / 8
