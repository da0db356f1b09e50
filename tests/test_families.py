from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import pspec.models
from pspec.errors import ConfigError
from pspec.models.config import BlockConfig, Llama3Scaling, RopeConfig, TargetConfig
from pspec.models.families import find_family, resolve_target, supported_families
from pspec.models.hf_config import HARMLESS, NEUTRAL
from tiny import make_hf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 24}


def test_llama_defaults_are_those_of_transformers() -> None:
    assert resolve_target(LLAMA) == TargetConfig(
        family="llama",
        vocab_size=320,
        num_layers=2,
        block=BlockConfig(64, 96, 4, 2, 16, norm_eps=1e-6),
        rope=RopeConfig(10000.0),
        tied_head=False,
        max_positions=2048,
    )


def test_every_field_of_llama_is_read() -> None:
    config = LLAMA | {
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [7, 2],
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }

    assert resolve_target(config) == TargetConfig(
        family="llama",
        vocab_size=320,
        num_layers=2,
        block=BlockConfig(64, 96, 4, 2, 24, 1e-5, "gelu", True, True, True, False),
        rope=RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        tied_head=True,
        max_positions=4096,
        bos_token_id=1,
        eos_token_ids=(2, 7),
    )


def test_qwen3_norms_heads_and_has_no_mlp_bias() -> None:
    block = resolve_target(QWEN3 | {"attention_bias": True}).block

    assert block == BlockConfig(64, 96, 4, 2, 24, 1e-6, "silu", True, True, False, True)
    with pytest.raises(ConfigError, match=r"mlp_bias is True.* supported: false or null"):
        resolve_target(QWEN3 | {"mlp_bias": True})


def test_qwen3_defaults_are_those_of_transformers() -> None:
    config = {k: v for k, v in QWEN3.items() if k not in ("head_dim", "num_key_value_heads")}

    block = resolve_target(config | {"num_attention_heads": 64}).block

    assert (block.num_key_value_heads, block.head_dim) == (32, 128)


def test_null_head_counts_follow_from_the_others() -> None:
    block = resolve_target(LLAMA | {"head_dim": None, "num_key_value_heads": None}).block

    assert (block.num_key_value_heads, block.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_pytorch_tanh"),
        ("gelu_pytorch_tanh", "gelu_pytorch_tanh"),
    ],
)
@pytest.mark.parametrize("field", ["hidden_act", "hidden_activation"])
def test_activation_names(field: str, name: str, expected: str) -> None:
    assert resolve_target(LLAMA | {field: name}).block.activation == expected


@pytest.mark.parametrize(("value", "expected"), [(None, ()), (5, (5,)), ([9, 3, 9], (3, 9))])
def test_eos_may_be_null_one_or_many(value: object, expected: tuple[int, ...]) -> None:
    assert resolve_target(LLAMA | {"eos_token_id": value}).eos_token_ids == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_transformers_saves_is_understood(family: str, tmp_path: Path) -> None:
    model, folder = make_hf(family, tmp_path)

    saved = resolve_target(json.loads((folder / "config.json").read_text()))
    in_memory = resolve_target(model.config.to_dict())

    assert saved == in_memory
    assert saved.rope == RopeConfig(10000.0)


@pytest.mark.parametrize("field", [{"torch_dtype": "float16"}, {"dtype": "bfloat16"}, {}])
def test_dtype_in_either_spelling_is_harmless(field: dict[str, str]) -> None:
    assert resolve_target(LLAMA | field) == resolve_target(LLAMA)


def test_published_configs_are_understood() -> None:
    smollm2 = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_theta": 100000,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }
    qwen3 = {
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "layer_types": ["full_attention", "full_attention"],
        "use_cache": True,
    }

    assert resolve_target(LLAMA | smollm2).rope == RopeConfig(100000.0)
    assert resolve_target(QWEN3 | qwen3 | {"sliding_window": 4096}) == resolve_target(QWEN3)


@pytest.mark.parametrize("field", sorted(NEUTRAL))
def test_fields_without_effect_pass_and_with_effect_are_refused(field: str) -> None:
    neutral = NEUTRAL[field]

    assert resolve_target(LLAMA | {field: neutral}) == resolve_target(LLAMA | {field: None})
    with pytest.raises(ConfigError, match=f"{field} is "):
        resolve_target(LLAMA | {field: 30.0})


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("base", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_missing_required_field_is_named(base: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        resolve_target({key: value for key, value in base.items() if key != field})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, qwen3"),
        ({"model_type": "rope"}, "'rope' is not supported"),
        ({"model_type": "../llama"}, "is not supported"),
        ({"model_type": None}, "None is not supported"),
        ({"text_config": {"model_type": "llama"}}, "text_config: wrappers"),
        ({"vision_config": {}}, "vision_config: wrappers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised"),
        ({"quantization": {"bits": 4}}, "quantization: quantised"),
        ({"compression_config": {"format": "x"}}, "compression_config: quantised"),
        ({"frobnicate": 1}, "unknown config field 'frobnicate'"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "unknown config field 'auto_map'"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 is not a multiple of .* 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_attention_heads": 6, "hidden_size": 64}, "no head_dim"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"attention_bias": "no"}, "attention_bias is 'no'"),
        ({"mlp_bias": 1}, "mlp_bias is 1"),
        ({"hidden_act": "relu2"}, "'relu2' is not supported"),
        ({"hidden_act": "silu", "hidden_activation": "gelu"}, "disagree"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has sliding_attention"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is"),
        ({"eos_token_id": [2, 320]}, "eos_token_id 320 is not below vocab_size 320"),
        ({"bos_token_id": 400}, "bos_token_id 400 is not below vocab_size 320"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
    ],
)
def test_refusals_name_the_culprit_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_target(LLAMA | change)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "sliding_window": 8},
        {"layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_sliding_windows_of_qwen3_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"use_sliding_window|sliding_attention"):
        resolve_target(QWEN3 | change)


def test_harmless_fields_do_not_hide_fields_with_an_effect() -> None:
    assert not HARMLESS & NEUTRAL.keys()
    assert not HARMLESS & LLAMA.keys() - {"model_type"}


def test_a_family_is_one_more_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynah.py").write_text(
        "from pspec.models import llama\n"
        "MODEL_TYPE = 'mynah'\n"
        "GGUF_INTERLEAVED = False\n"
        "resolve = llama.resolve\n"
    )
    monkeypatch.setattr(pspec.models, "__path__", [*pspec.models.__path__, str(tmp_path)])
    try:
        assert resolve_target(LLAMA | {"model_type": "mynah"}).vocab_size == 320
        assert supported_families() == ["llama", "mynah", "qwen3"]
        assert find_family("mynah").GGUF_INTERLEAVED is False
    finally:
        sys.modules.pop("pspec.models.mynah", None)
