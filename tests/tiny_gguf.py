"""Write a tiny transformers model as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import PreTrainedModel

from tiny import EOS_ID, TEMPLATE, make_tokenizer

Kind = GGMLQuantizationType
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    kind: Kind = Kind.F32,
    architecture: str | None = None,
    keys: dict[str, int | float | str] | None = None,
    replaced: dict[str, int] | None = None,
    tokens: dict[str, int] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write ``model`` with weight matrices of ``kind``.

    Args:
        model: a llama or qwen3 model.
        path: the file.
        kind: type of 2-D tensors; vectors stay fp32.
        architecture: what to call it, if not by its model type.
        keys: further metadata, without the architecture's prefix.
        replaced: other values for metadata that is there.
        tokens: further special tokens, such as ``eot``.
        tensors: further tensors, under llama.cpp's names.
    """
    writer = GGUFWriter(path, architecture or model.config.model_type)
    for key, value in (_config(model.config) | (replaced or {}) | (keys or {})).items():
        add: dict[type, Any] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add[type(value)](f"{writer.arch}.{key}", value)
    _add_vocabulary(writer)
    for name, token in (tokens or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            _add_tensor(writer, _gguf_name(name), _interleaved(model.config, name, tensor), kind)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _config(config: Any) -> dict[str, int | float | str]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }


def _add_vocabulary(writer: GGUFWriter) -> None:
    content = json.loads(make_tokenizer().backend_tokenizer.to_str())
    ids = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ids])
    writer.add_token_types([3 if index < 3 else 1 for _, index in ids])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{suffix}"


def _interleaved(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Llama's q and k as llama.cpp keeps them: the two channels of a rotary pair side by side."""
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if heads is None or config.model_type != "llama":
        return tensor
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: Kind) -> None:
    values = tensor.float().contiguous().numpy()
    if values.ndim == 1 or kind == Kind.F32:
        writer.add_tensor(name, values)
    elif kind == Kind.F64:
        writer.add_tensor(name, values.astype("float64"))
    else:
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
