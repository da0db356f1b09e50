from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_edits import drop, edit_json, put, refused, save_sharded
from pspec.errors import CheckpointError, ConfigError
from pspec.models.checkpoint import load_target
from tiny import make_hf, make_tokenizer

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("lm_head.weight"), "lm_head.weight is missing and tie_word_embeddings is false"),
        (drop(f"{Q}.weight"), f"{Q}.weight is missing"),
        (drop("model.norm.weight"), "model.norm.weight is missing"),
        (put(f"{Q}.bias", torch.ones(96)), rf"model.safetensors: {Q}.bias would be ignored"),
        (put("model.layers.2.x.weight", torch.ones(2)), "model.layers.2.x.weight would be ignored"),
        (put("score.weight", torch.ones(2, 64)), "score.weight would be ignored"),
        (put(f"{Q}.weight", torch.ones(64, 96)), r"q_proj.weight has shape \[64, 96\].*\[96, 64\]"),
        (put("lm_head.weight", torch.ones(319, 64)), r"\[319, 64\], expected \[320, 64\]"),
        (put(f"{Q}.weight", torch.ones(96, 64).to(torch.int8)), "q_proj.weight has type I8"),
        (put(f"{Q}.weight", torch.ones(96, 64).to(torch.float8_e4m3fn)), "has type F8_E4M3"),
        (put(f"{Q}.weight", torch.full((96, 64), torch.nan)), "q_proj.weight holds NaN"),
        (put(f"{Q}.weight", torch.full((96, 64), torch.inf)), "q_proj.weight holds NaN or inf"),
    ],
)
def test_a_tensor_at_fault_is_named(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    _, folder = make_hf("llama", tmp_path)
    damage(folder)

    refused(folder, CheckpointError, message)


def test_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path, tie_word_embeddings=True)
    put("lm_head.weight", torch.ones(319, 64))(folder)

    refused(folder, CheckpointError, "lm_head.weight would be ignored")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_file_cut_short_is_named(keep: float, tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if 0 < keep < 1 else int(keep)])

    refused(folder, CheckpointError, "model.safetensors: .*download it again")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('["x"]', "not an object"),
        ("{nonsense", "not a whole safetensors file"),
        ('{"a": {"dtype": "F32"}}', "entry of a is malformed"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "contradicts its shape"),
        (
            '{"a": {"dtype": "F32", "shape": [0]}, "a": {"dtype": "F32", "shape": [0]}}',
            "a is there twice",
        ),
    ],
)
def test_a_damaged_header_is_refused(header: str, message: str, tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
    content = len(header).to_bytes(8, "little") + header.encode()
    (folder / "model.safetensors").write_bytes(content)

    refused(folder, CheckpointError, message)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def lose_shard(folder: Path) -> None:
    shards(folder)[1].unlink()


def cut_shard(folder: Path) -> None:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-8])


def lose_tensor(folder: Path) -> None:
    path = shards(folder)[0]
    tensors = load_file(path)
    tensors.pop(min(tensors))
    save_file(tensors, path)


def double_tensor(folder: Path) -> None:
    one, other = shards(folder)[:2]
    name, value = next(iter(load_file(one).items()))
    save_file(load_file(other) | {name: value}, other)


def point_outside(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    edit_json(path, weight_map=weight_map | {"model.norm.weight": "../model.safetensors"})


def lose_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_shard, r"model-00002-of-\d+.safetensors is missing, but model.safetensors.index"),
        (cut_shard, r"model-00002-of-\d+.safetensors: \d+ bytes, but its header describes"),
        (lose_tensor, r"index.json: \S+ is not in model-00001-of-\d+.safetensors"),
        (double_tensor, r"model-00002-of-\d+.safetensors: \S+ is also in model-00001"),
        (point_outside, "'../model.safetensors' is not the name of a file beside it"),
        (lose_map, "index.json: not an index of weights"),
    ],
)
def test_index_and_shards_must_agree(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    model, folder = make_hf("llama", tmp_path)
    save_sharded(model, folder)
    damage(folder)

    refused(folder, CheckpointError, message)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("pytorch_model.bin", "convert them with"),
        ("pytorch_model.bin.index.json", "convert them with"),
        ("adapter_config.json", "merge it into its base model"),
        ("other.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_folder_without_safetensors(other: str, message: str, tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / other)

    refused(folder, CheckpointError, message)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, CheckpointError, "no config.json; expected a Hugging Face checkpoint")
    refused(tmp_path / "notes.txt", CheckpointError, "expected a folder, a .gguf file or a hub id")
    refused(tmp_path / "absent", CheckpointError, "no such folder or file")
    refused("absent.gguf", CheckpointError, "no such folder or file")
    (tmp_path / "m.gguf").touch()
    refused(tmp_path, CheckpointError, "name its file, such as m.gguf")


def test_damaged_config_is_refused(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
    edit_json(folder / "config.json", hidden_size=0)
    refused(folder, ConfigError, "config.json: hidden_size is 0")
    (folder / "config.json").write_text("{")
    refused(folder, CheckpointError, "config.json: not JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, CheckpointError, "config.json: expected a JSON object")


def test_padded_vocabulary_is_fine_and_a_larger_tokenizer_is_not(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
    assert load_target(str(folder)).config.vocab_size == 320

    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(41)])
    tokenizer.save_pretrained(folder)

    refused(folder, ConfigError, "id 320 .'<extra40>'. is not below vocab_size 320")


@pytest.mark.parametrize("value", ["x", [1.5], 320])
def test_wrong_eos_of_generation_config_is_refused(value: object, tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
    edit_json(folder / "generation_config.json", eos_token_id=value)

    refused(folder, ConfigError, "eos_token_id")


def test_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    refused(folder, CheckpointError, "tokenizer.json: not a tokenizers file")
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    refused(folder, CheckpointError, "tokenizer.json: cannot be read as text")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    refused(folder, CheckpointError, "tokenizer.json: no tokenizer can be read")
