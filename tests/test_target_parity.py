from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel

from pspec.models.checkpoint import LoadedTarget, load_target
from pspec.models.config import RopeConfig
from pspec.models.decoder import Features, TargetGraph
from pspec.models.graph import run_graph
from tiny import LLAMA3_ROPE, make_hf

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
    graph = TargetGraph(loaded.decoder, positions=64, features=features)
    if rope is not None:
        loaded.decoder.config = replace(loaded.config, rope=rope)
        graph = TargetGraph(loaded.decoder, positions=64, features=features)
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
