from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from checkpoint_edits import edit_json, edit_tensors, put, refused, same_weights, save_sharded
from pspec.errors import CheckpointError
from pspec.models.checkpoint import load_target
from tiny import TEMPLATE, make_hf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_widened_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model, folder = make_hf("llama", tmp_path, dtype=dtype)

    loaded = load_target(str(folder))

    state = loaded.decoder.state_dict()
    expected = model.state_dict()["model.layers.1.mlp.up_proj.weight"].float()
    assert torch.equal(state["layers.1.mlp.up_proj.weight"].t(), expected)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in loaded.decoder.parameters())
    assert not loaded.decoder.training


def test_shards_give_the_same_decoder(tmp_path: Path) -> None:
    model, folder = make_hf("llama", tmp_path / "one")
    whole = load_target(str(folder))
    shutil.copytree(folder, tmp_path / "many")

    save_sharded(model, tmp_path / "many")

    assert same_weights(load_target(str(tmp_path / "many")), whole)


def test_large_tensors_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = make_hf("llama", tmp_path, attention_bias=True)
    whole = load_target(str(folder))

    monkeypatch.setattr("pspec.models.weights.BLOCK_ELEMENTS", 1000)

    assert same_weights(load_target(str(folder)), whole)


def test_stray_weights_are_ignored_with_a_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, folder = make_hf("llama", tmp_path)
    whole = load_target(str(folder))
    save_sharded(model, folder)
    tensors = {"model.norm.weight": torch.zeros(64)}
    save_file(tensors, folder / "model.safetensors")
    save_file(tensors, folder / "consolidated.safetensors")

    with caplog.at_level(logging.WARNING):
        assert same_weights(load_target(str(folder)), whole)

    assert "ignoring consolidated.safetensors, model.safetensors" in caplog.text


def test_tied_head_that_differs_is_kept(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path, tie_word_embeddings=True)
    head = torch.randn(320, 64, generator=torch.Generator().manual_seed(3))
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))

    loaded = load_target(str(folder))

    assert loaded.config.tied_head is False
    assert loaded.decoder.lm_head is not None
    assert torch.equal(loaded.decoder.lm_head.weight, head.t())
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert same_weights(load_target(str(folder)), loaded)


def test_tied_head_that_repeats_the_embedding_is_dropped(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path, tie_word_embeddings=True)
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
    _, folder = make_hf("llama", tmp_path)
    names = ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq")
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(12) for name in names}))

    assert load_target(str(folder)).config.num_layers == 2


def test_eos_is_the_union_of_all_files(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
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


def test_text_files_are_enough_to_chat(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path / "source")
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
    _, folder = make_hf("llama", tmp_path)
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=inline)

    assert load_target(str(folder)).text.chat_template == TEMPLATE


def test_special_tokens_are_written_for_a_template_that_names_them(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path / "source")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (folder / "generation_config.json").unlink()
    (tmp_path / "bundle").mkdir()

    load_target(str(folder)).save_text_files(tmp_path / "bundle")

    found = sorted(path.name for path in (tmp_path / "bundle").iterdir())
    assert found == ["chat_template.jinja", "special_tokens.json", "tokenizer.json"]
    special = json.loads((tmp_path / "bundle" / "special_tokens.json").read_text())
    assert special["bos_token"] == "<|im_start|>"


def test_tokenizer_of_older_files_is_converted(tmp_path: Path) -> None:
    _, folder = make_hf("llama", tmp_path)
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
    _, folder = make_hf("llama", tmp_path / "a")
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
    _, folder = make_hf("llama", tmp_path / "snapshot")
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
