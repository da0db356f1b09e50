"""A Llama checkpoint of random weights, written shard by shard, never in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_SPECIAL = ("<|begin_of_text|>", "<|eot_id|>")
_SPREAD = 0.02


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of a checkpoint; the defaults are Llama 3.2 1B's."""

    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_attention_heads


def write_random_llama(folder: Path, size: LlamaSize, *, seed: int = 0) -> int:
    """Write a bf16 checkpoint with a tiny tokenizer; returns its number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    parameters = 0
    count = size.num_hidden_layers + 1
    for number, shapes in enumerate(_shards(size), start=1):
        file = f"model-{number:05}-of-{count:05}.safetensors"
        tensors = {name: _random(shape, generator) for name, shape in shapes.items()}
        parameters += sum(tensor.numel() for tensor in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": weight_map}
    _write(folder / "model.safetensors.index.json", index)
    _write(folder / "config.json", _config(size))
    special = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}
    _write(folder / "tokenizer_config.json", special)
    _tokenizer().save(str(folder / "tokenizer.json"))
    return parameters


def _shards(size: LlamaSize) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes, a shard for the embedding and one for each layer."""
    hidden, inner = size.hidden_size, size.intermediate_size
    rows = size.num_key_value_heads * size.head_dim
    yield {"model.embed_tokens.weight": (size.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(size.num_hidden_layers):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (rows, hidden),
            "self_attn.v_proj": (rows, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        yield {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, _SPREAD, generator=generator)
    return tensor + 1 if len(shape) == 1 else tensor


def _config(size: LlamaSize) -> dict[str, Any]:
    sizes = {name: getattr(size, name) for name in size.__dataclass_fields__}
    return sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _tokenizer() -> Tokenizer:
    """Bytes and two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=258,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return tokenizer


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
