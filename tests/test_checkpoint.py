from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from pspec.errors import CheckpointError, ConfigError, PspecError
from pspec.models.checkpoint import LoadedTarget, load_target
from pspec.models.config import RopeConfig
from pspec.models.decoder import Features, TargetGraph
from pspec.models.graph import run_graph
from tiny import LLAMA3_ROPE, TEMPLATE, make_hf, make_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-llama3": {"family": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-many-heads": {"family": "llama", "num_key_value_heads": 4, "head_dim": 8},
    "llama-gelu": {"family": "llama", "hidden_act": "gelu_pytorch_tanh"},
    "qwen3": {"family": "qwen3"},
    "qwen3-biases-tied": {"family": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
}
IDS = torch.randint(0, 320, (1, 25), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def make(name: str, folder: Path, **more: Any) -> tuple[PreTrainedModel, Path]:
    return make_hf(**(MODELS[name] | more), folder=folder)


def cache_of(loaded: LoadedTarget, slots: int) -> dict[str, Tensor]:
    block = loaded.config.block
    shape = (1, block.num_key_value_heads, slots, block.head_dim)
    parts = [(k, i) for i in range(loaded.config.num_layers) for k in ("key", "value")]
    return {f"past_{part}.{layer}": torch.zeros(shape) for part, layer in parts}


def run(
    loaded: LoadedTarget,
    ids: Tensor,
    *,
    features: Features = (),
    cache: dict[str, Tensor] | None = None,
    length: int = 0,
    rope: RopeConfig | None = None,
) -> dict[str, Tensor]:
    """Outputs for a chain of tokens after ``length`` cached ones; logits of every row."""
    graph = TargetGraph(loaded.decoder, batch=1, positions=64, features=features)
    if rope is not None:
        loaded.decoder.config = replace(loaded.config, rope=rope)
        graph = TargetGraph(loaded.decoder, batch=1, positions=64, features=features)
    count = ids.shape[1]
    rows = torch.arange(count, dtype=torch.int32)[None]
    feeds = {
        "token_ids": ids,
        "position_ids": rows + length,
        "tree_mask": torch.ones(1, count, count, dtype=torch.bool).tril(),
        "cache_length": torch.tensor([length], dtype=torch.int32),
        "logit_rows": rows,
    }
    return run_graph(graph, feeds | (cache or cache_of(loaded, 8)))


@torch.inference_mode()
def reference(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and hidden states at every boundary followed by the post-norm one."""
    seen: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    result = model.float()(ids.long(), output_hidden_states=True)
    handle.remove()
    *states, last = result.hidden_states
    return result.logits, [*states, seen[0], last]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_hidden_states_equal_transformers(name: str, tmp_path: Path) -> None:
    model, folder = make(name, tmp_path)
    logits, states = reference(model, IDS)

    loaded = load_target(str(folder))
    found = run(loaded, IDS, features=(0, 1, 2))

    close(found["logits"], logits)
    close(found["feature"], torch.cat(states[:3], dim=-1))
    assert torch.equal(found["next_token"], logits.argmax(-1).int())
    close(run(loaded, IDS, features="last")["feature"], states[3])


@pytest.mark.parametrize("name", MODELS)
def test_tokens_after_a_filled_cache_equal_one_pass(name: str, tmp_path: Path) -> None:
    model, folder = make(name, tmp_path)
    logits, _ = reference(model, IDS)
    loaded = load_target(str(folder))
    cache = cache_of(loaded, 32)

    first = run(loaded, IDS[:, :20], cache=cache)
    for key, rows in cache.items():
        rows[:, :, :20] = first[key.replace("past", "new")]
    then = run(loaded, IDS[:, 20:], cache=cache, length=20)

    close(torch.cat((first["logits"], then["logits"]), dim=1), logits)


def drop_biases(loaded: LoadedTarget) -> None:
    for name, parameter in loaded.decoder.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()


def drop_head_norms(loaded: LoadedTarget) -> None:
    for name, parameter in loaded.decoder.named_parameters():
        if "_norm" in name and "self_attn" in name:
            parameter.fill_(1.0)


@pytest.mark.parametrize(
    ("name", "mutate", "rope"),
    [
        ("llama-llama3", lambda _: None, RopeConfig(10000.0)),
        ("llama", lambda _: None, RopeConfig(20000.0)),
        ("llama-biases", drop_biases, None),
        ("qwen3-biases-tied", drop_biases, None),
        ("qwen3", drop_head_norms, None),
    ],
)
def test_parity_would_see_an_ignored_quirk(
    name: str,
    mutate: Callable[[LoadedTarget], None],
    rope: RopeConfig | None,
    tmp_path: Path,
) -> None:
    model, folder = make(name, tmp_path)
    logits, _ = reference(model, IDS)
    loaded = load_target(str(folder))

    mutate(loaded)

    assert (run(loaded, IDS, rope=rope)["logits"] - logits).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_widened_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model, folder = make("llama", tmp_path, dtype=dtype)

    loaded = load_target(str(folder))

    state = loaded.decoder.state_dict()
    expected = model.state_dict()["model.layers.1.mlp.up_proj.weight"].float()
    assert torch.equal(state["layers.1.mlp.up_proj.weight"].t(), expected)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in loaded.decoder.parameters())
    assert not loaded.decoder.training


def save_sharded(model: PreTrainedModel, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="80KB")
    assert (folder / "model.safetensors.index.json").is_file()


def same_weights(one: LoadedTarget, other: LoadedTarget) -> bool:
    a, b = one.decoder.state_dict(), other.decoder.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_shards_give_the_same_decoder(tmp_path: Path) -> None:
    model, folder = make("llama", tmp_path / "one")
    whole = load_target(str(folder))
    shutil.copytree(folder, tmp_path / "many")

    save_sharded(model, tmp_path / "many")

    assert same_weights(load_target(str(tmp_path / "many")), whole)


def test_large_tensors_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = make("llama-biases", tmp_path)
    whole = load_target(str(folder))

    monkeypatch.setattr("pspec.models.weights.BLOCK_ELEMENTS", 1000)

    assert same_weights(load_target(str(folder)), whole)


def test_stray_weights_are_ignored_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = make("llama", tmp_path)
    whole = load_target(str(folder))
    save_sharded(model, folder)
    tensors = {"model.norm.weight": torch.zeros(64)}
    save_file(tensors, folder / "model.safetensors")
    save_file(tensors, folder / "consolidated.safetensors")

    with caplog.at_level(logging.WARNING):
        assert same_weights(load_target(str(folder)), whole)

    assert "ignoring consolidated.safetensors, model.safetensors" in caplog.text


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def test_tied_head_that_differs_is_kept(tmp_path: Path) -> None:
    _, folder = make("llama-tied", tmp_path)
    head = torch.randn(320, 64, generator=torch.Generator().manual_seed(3))
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))

    loaded = load_target(str(folder))

    assert loaded.config.tied_head is False
    assert loaded.decoder.lm_head is not None
    assert torch.equal(loaded.decoder.lm_head.weight, head.t())
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert same_weights(load_target(str(folder)), loaded)


def test_tied_head_that_repeats_the_embedding_is_dropped(tmp_path: Path) -> None:
    _, folder = make("llama-tied", tmp_path)
    plain = load_target(str(folder))
    edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )

    loaded = load_target(str(folder))

    assert loaded.config.tied_head
    assert loaded.decoder.lm_head is None
    assert same_weights(loaded, plain)


def test_derived_tensors_are_left_over(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    names = ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq")
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(12) for name in names}))

    assert load_target(str(folder)).config.num_layers == 2


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def put(name: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: value}))


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
    _, folder = make("llama", tmp_path)
    damage(folder)

    refused(folder, CheckpointError, message)


def refused(source: Path | str, error: type[PspecError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_target(str(source))
    assert "\n" not in str(caught.value)


def test_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    _, folder = make("llama-tied", tmp_path)
    put("lm_head.weight", torch.ones(319, 64))(folder)

    refused(folder, CheckpointError, "lm_head.weight would be ignored")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_file_cut_short_is_named(keep: float, tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
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
    _, folder = make("llama", tmp_path)
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
    model, folder = make("llama", tmp_path)
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
    _, folder = make("llama", tmp_path)
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
    _, folder = make("llama", tmp_path)
    edit_json(folder / "config.json", hidden_size=0)
    refused(folder, ConfigError, "config.json: hidden_size is 0")
    (folder / "config.json").write_text("{")
    refused(folder, CheckpointError, "config.json: not JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, CheckpointError, "config.json: expected a JSON object")


def test_padded_vocabulary_is_fine_and_a_larger_tokenizer_is_not(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    assert load_target(str(folder)).config.vocab_size == 320

    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(41)])
    tokenizer.save_pretrained(folder)

    refused(folder, ConfigError, "id 320 .'<extra40>'. is not below vocab_size 320")


def test_eos_is_the_union_of_all_files(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    assert load_target(str(folder)).config.eos_token_ids == (2,)

    edit_json(folder / "config.json", eos_token_id=7, bos_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 7], bos_token_id=5)

    config = load_target(str(folder)).config
    assert config.eos_token_ids == (2, 7, 9)
    assert config.bos_token_id == 5
    edit_json(folder / "generation_config.json", eos_token_id=None, bos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    config = load_target(str(folder)).config
    assert config.eos_token_ids == (0, 7)
    assert config.bos_token_id == 1


@pytest.mark.parametrize("value", ["x", [1.5], 320])
def test_wrong_eos_of_generation_config_is_refused(value: object, tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    edit_json(folder / "generation_config.json", eos_token_id=value)

    refused(folder, ConfigError, "eos_token_id")


def test_text_files_are_enough_to_chat(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path / "source")
    (tmp_path / "bundle").mkdir()

    load_target(str(folder)).save_text_files(tmp_path / "bundle")

    names = ["chat_template.jinja", "generation_config.json", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "bundle").iterdir()) == names
    for name in names:
        assert (tmp_path / "bundle" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    "inline",
    [TEMPLATE, [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]],
)
def test_inline_template_becomes_a_file(inline: object, tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=inline)

    assert load_target(str(folder)).text.chat_template == TEMPLATE


def test_special_tokens_are_written_for_a_template_that_names_them(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path / "source")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (folder / "generation_config.json").unlink()
    (tmp_path / "bundle").mkdir()

    load_target(str(folder)).save_text_files(tmp_path / "bundle")

    found = sorted(path.name for path in (tmp_path / "bundle").iterdir())
    assert found == ["chat_template.jinja", "special_tokens.json", "tokenizer.json"]
    special = json.loads((tmp_path / "bundle" / "special_tokens.json").read_text())
    assert special["bos_token"] == "<|im_start|>"


def test_missing_or_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    refused(folder, CheckpointError, "tokenizer.json: not a tokenizers file")
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    refused(folder, CheckpointError, "tokenizer.json: cannot be read as text")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    refused(folder, CheckpointError, "tokenizer.json: no tokenizer can be read")


def test_tokenizer_of_older_files_is_converted(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    merges = "\n".join(" ".join(pair) for pair in content["model"]["merges"])
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")

    text = load_target(str(folder)).text

    assert text.vocabulary == AutoTokenizer.from_pretrained(folder).get_vocab()
    assert text.special_id("eos_token") == 2


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    first, second = (load_target(str(tmp_path / name)).fingerprint for name in "ab")
    assert first == second

    put("model.norm.weight", torch.ones(64))(tmp_path / "b")
    third = load_target(str(tmp_path / "b")).fingerprint
    edit_json(tmp_path / "b" / "config.json", rope_theta=None, rms_norm_eps=1e-5)
    assert len({first, third, load_target(str(tmp_path / "b")).fingerprint}) == 3


def test_hub_id_is_downloaded_once_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = make("llama", tmp_path / "snapshot")
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append((repository, options))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = load_target("owner/some-model.v2", cache_dir=tmp_path)

    assert loaded.source == "owner/some-model.v2"
    assert same_weights(loaded, load_target(str(folder)))
    assert calls[0][0] == "owner/some-model.v2"
    assert calls[0][1]["cache_dir"] == tmp_path


def test_failing_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repository: str, **options: Any) -> str:
        raise OSError("401 Client Error.\n\nCannot access gated repo")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    refused("owner/model", CheckpointError, r"did not provide it \(401 Client Error.\); check the")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("owner/model", CheckpointError, r"pip install 'pspec-toolkit\[export\]'")


def test_offline_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(
        CheckpointError, match="download it elsewhere and pass the folder"
    ) as caught:
        load_target("owner/model", cache_dir=tmp_path)

    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_peak_memory_is_the_weights_in_fp32(tmp_path: Path) -> None:
    # 40 million parameters, 80 MB in bf16; keeping those as well would make 1.5.
    _, folder = make_hf(
        "llama",
        tmp_path,
        dtype=torch.bfloat16,
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=1024,
        num_attention_heads=16,
        head_dim=64,
        tie_word_embeddings=True,
        num_hidden_layers=4,
    )
    code = """
import resource, sys
from pspec.models.checkpoint import load_target
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
loaded = load_target(sys.argv[1])
size = sum(p.numel() * 4 for p in loaded.decoder.parameters())
sys.stdout.write(f"{size} {peak() - before}")
"""
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    size, grown = map(int, done.stdout.split())
    assert grown < 1.3 * size
