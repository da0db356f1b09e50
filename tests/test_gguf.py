from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from pspec.errors import CheckpointError, ConfigError, PspecError
from pspec.models.checkpoint import LoadedTarget, load_target
from pspec.models.config import RopeConfig
from pspec.models.gguf_config import llama3_scaling
from pspec.models.rope import inverse_frequencies, resolve_rope
from tiny import LLAMA3_ROPE, TEMPLATE, make_hf
from tiny_gguf import write_gguf

LLAMA3_8K = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}


def assert_same(one: LoadedTarget, other: LoadedTarget) -> None:
    """Equal weights, and equal configs but for what fp32 metadata rounds."""
    a, b = one.decoder.state_dict(), other.decoder.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
    assert one.config.rope == other.config.rope
    assert one.config.tied_head == other.config.tied_head
    assert one.config.eos_token_ids == other.config.eos_token_ids
    assert one.config.bos_token_id == other.config.bos_token_id
    assert one.config.block.norm_eps == pytest.approx(other.config.block.norm_eps)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_gguf_equals_its_safetensors_twin(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model, folder = make_hf(family, tmp_path, **fields)

    loaded = load_target(str(write_gguf(model, tmp_path / "model.gguf")))

    assert_same(loaded, load_target(str(folder)))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_precision_equals_its_twin(kind: Kind, tmp_path: Path) -> None:
    dtype = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    model, folder = make_hf("llama", tmp_path, dtype=dtype)

    loaded = load_target(str(write_gguf(model, tmp_path / "model.gguf", kind=kind)))

    assert_same(loaded, load_target(str(folder)))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_weights_equal_transformers(kind: Kind, tmp_path: Path) -> None:
    model, _ = make_hf("llama", tmp_path / "source")
    path = write_gguf(model, tmp_path / "model.gguf", kind=kind)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()

    state = load_target(str(path)).decoder.state_dict()

    assert len(state) == len(reference)
    for name, tensor in state.items():
        expected = reference[name if name == "lm_head.weight" else f"model.{name}"]
        transposed = tensor.ndim == 2 and name != "embed_tokens.weight"
        assert torch.equal(tensor.t() if transposed else tensor, expected), name


def test_text_comes_from_the_metadata(tmp_path: Path) -> None:
    model, folder = make_hf("llama", tmp_path / "source")
    path = write_gguf(model, tmp_path / "model.gguf")
    (tmp_path / "bundle").mkdir()

    loaded = load_target(str(path))
    loaded.save_text_files(tmp_path / "bundle")

    names = sorted(file.name for file in (tmp_path / "bundle").iterdir())
    assert names == ["chat_template.jinja", "tokenizer.json"]
    assert loaded.text.chat_template == TEMPLATE
    text = "The quick dog prints 123.<|im_end|>\n"
    one, other = (AutoTokenizer.from_pretrained(folder), tmp_path / "bundle" / "tokenizer.json")
    found = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert other.read_text() == found.backend_tokenizer.to_str()
    assert found(text)["input_ids"] == one(text)["input_ids"]


def test_tokenizer_files_beside_it_do_not_matter(tmp_path: Path) -> None:
    model, folder = make_hf("llama", tmp_path)
    path = write_gguf(model, tmp_path / "model.gguf")
    (folder / "tokenizer.json").write_text("damaged")
    (folder / "chat_template.jinja").write_text("of another model")

    text = load_target(str(path)).text

    assert text.chat_template == TEMPLATE
    assert text.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_end_of_turn_is_an_eos(tmp_path: Path) -> None:
    model, _ = make_hf("llama", tmp_path)
    path = write_gguf(model, tmp_path / "model.gguf", tokens={"eot": 9})

    assert load_target(str(path)).config.eos_token_ids == (2, 9)


def slowed(rope: dict[str, Any]) -> torch.Tensor:
    plain = inverse_frequencies(RopeConfig(10000.0), 24)
    return (plain / inverse_frequencies(resolve_rope({"rope_parameters": rope}), 24)).float()


def test_llama3_scaling_is_recovered(tmp_path: Path) -> None:
    model, folder = make_hf("llama", tmp_path, rope_parameters=LLAMA3_8K)
    tensors = {"rope_freqs.weight": slowed(LLAMA3_8K)}

    loaded = load_target(str(write_gguf(model, tmp_path / "model.gguf", tensors=tensors)))

    assert loaded.config.rope.scaling is not None
    assert_same(loaded, load_target(str(folder)))


def test_other_rope_factors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="is not the scaling of Llama 3"):
        llama3_scaling(slowed(LLAMA3_ROPE), 10000.0)


def refused(path: Path, error: type[PspecError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_target(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope type 'yarn'"),
        ({"rope.scaling.factor": 2.0}, "rope type 'linear'"),
        ({"attention.sliding_window": 8}, "unknown GGUF key llama.attention.sliding_window"),
        ({"logit_scale": 0.5}, "unknown GGUF key llama.logit_scale"),
        ({"expert_count": 8}, "num_local_experts is 8"),
    ],
)
def test_metadata_that_changes_the_computation_is_refused(
    keys: dict[str, int | float | str], message: str, tmp_path: Path
) -> None:
    model, _ = make_hf("llama", tmp_path)

    path = write_gguf(model, tmp_path / "model.gguf", keys=keys)

    refused(path, ConfigError, f"model.gguf: {message}")


@pytest.mark.parametrize(
    "keys", [{"rope.scaling.type": "none"}, {"rope.scaling.factor": 1.0}, {"expert_count": 0}]
)
def test_metadata_without_effect_passes(keys: dict[str, int | float | str], tmp_path: Path) -> None:
    model, folder = make_hf("llama", tmp_path)

    loaded = load_target(str(write_gguf(model, tmp_path / "model.gguf", keys=keys)))

    assert_same(loaded, load_target(str(folder)))


@pytest.mark.parametrize("replaced", [{"rope.dimension_count": 12}, {"attention.value_length": 12}])
def test_head_sizes_must_agree(replaced: dict[str, int], tmp_path: Path) -> None:
    model, _ = make_hf("llama", tmp_path)

    path = write_gguf(model, tmp_path / "model.gguf", replaced=replaced)

    refused(path, ConfigError, f"GGUF key {min(replaced)} is 12; only the size of a head, 24")


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    model, _ = make_hf("llama", tmp_path)
    tensors = {"blk.0.attn_sinks.weight": torch.ones(4)}

    path = write_gguf(model, tmp_path / "model.gguf", tensors=tensors)

    refused(path, CheckpointError, "blk.0.attn_sinks.weight would be ignored")


def test_other_architecture_is_refused(tmp_path: Path) -> None:
    model, _ = make_hf("llama", tmp_path)

    path = write_gguf(model, tmp_path / "model.gguf", architecture="bloom")

    refused(path, CheckpointError, "architecture 'bloom' is not supported; supported: llama, qwen3")


def test_other_type_of_weights_is_refused(tmp_path: Path) -> None:
    model, _ = make_hf("llama", tmp_path)

    path = write_gguf(model, tmp_path / "model.gguf", kind=Kind.F64)

    refused(path, CheckpointError, "has type F64, which cannot be de-quantised")


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.01, 0.5, 0.99])
def test_a_file_cut_short_is_refused(keep: float, tmp_path: Path) -> None:
    model, _ = make_hf("llama", tmp_path)
    path = write_gguf(model, tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])

    refused(path, CheckpointError, "model.gguf: not a whole GGUF file .*download it again")


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)

    refused(path, CheckpointError, "not a whole GGUF file")


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    monkeypatch.setitem(sys.modules, "gguf", None)

    refused(path, CheckpointError, r"pip install 'pspec-toolkit\[export\]'")


def test_a_tokenizer_that_cannot_be_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("Cannot build a tokenizer\nfrom 'weird'")

    model, _ = make_hf("llama", tmp_path)
    path = write_gguf(model, tmp_path / "model.gguf")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)

    refused(path, CheckpointError, "no tokenizer can be read .Cannot build a tokenizer from 'weir")
