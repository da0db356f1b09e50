"""A drafter directory made from docs/drafter-format.md alone: JSON, NumPy and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Config = dict[str, Any]
Tensors = dict[str, NDArray[Any]]

BLOCK: Config = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
BASE: Config = {"slots": 4, "target_hidden_size": 32, "target_vocab_size": 60, "block": BLOCK}
DEFAULTS: Config = {
    "format": "pspec-drafter",
    "version": 1,
    "mask_embedding": "slot",
    "features": "none",
    "mask_feature": "none",
    "fuse": "none",
    "fuse_scale": 1.0,
    "fc_bias": False,
    "shift": False,
    "num_layers": 1,
    "rope": {"theta": 10000.0},
    "input_norm": True,
    "final_norm": True,
    "embedding": "target",
    "head": "target",
    "draft_vocab_size": None,
    "slot_attention": "causal",
}
BLOCK_DEFAULTS: Config = {
    "norm_eps": 1e-6,
    "activation": "silu",
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
}


def complete(**fields: Any) -> Config:
    """A config with every field; ``block`` holds changes of the small default block."""
    block = BLOCK_DEFAULTS | BLOCK | fields.pop("block", {})
    return DEFAULTS | BASE | fields | {"block": block}


def feature_width(config: Config) -> int:
    """F."""
    if config["features"] == "none":
        return 0
    count = len(config["features"]) if isinstance(config["features"], list) else 1
    return int(count * config["target_hidden_size"])


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file, ``[out, in]``, from the table."""
    hidden, masks = config["block"]["hidden_size"], config["slots"] - 1
    width, vocab = feature_width(config), config["target_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    if masks:
        shapes["mask_embedding"] = ({"slot": masks, "shared": 1}[config["mask_embedding"]], hidden)
        if config["mask_feature"] in ("slot", "shared"):
            rows = {"slot": masks, "shared": 1}[config["mask_feature"]]
            shapes["mask_feature"] = (rows, width)
    if has_fc(config):
        inner = width + hidden if config["fuse"] == "concat-fc" else width
        shapes["fc.weight"] = (hidden, inner)
        if config["fc_bias"]:
            shapes["fc.bias"] = (hidden,)
    if config["embedding"] == "own":
        shapes["embed_tokens.weight"] = (vocab, hidden)
    for layer in range(config["num_layers"]):
        names = _layer_shapes(config, layer)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in names.items()}
    if config["final_norm"]:
        shapes["norm.weight"] = (hidden,)
    if config["head"] == "own":
        shapes["lm_head.weight"] = (head_rows(config), hidden)
    if head_rows(config) < vocab:
        shapes["d2t"] = (head_rows(config),)
    return shapes


def has_fc(config: Config) -> bool:
    """Whether the file holds ``fc.weight``."""
    if config["fuse"] == "feature-only":
        return feature_width(config) != int(config["block"]["hidden_size"])
    return bool(config["fuse"] != "none")


def head_rows(config: Config) -> int:
    """Vd."""
    return int(config["draft_vocab_size"] or config["target_vocab_size"])


def _layer_shapes(config: Config, layer: int) -> dict[str, tuple[int, ...]]:
    block = config["block"]
    hidden, inner, size = block["hidden_size"], block["intermediate_size"], block["head_dim"]
    query, key = block["num_attention_heads"] * size, block["num_key_value_heads"] * size
    dual = layer == 0 and config["fuse"] == "dual-norm"
    wide = 2 * hidden if dual else hidden
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, wide),
        "self_attn.k_proj.weight": (key, wide),
        "self_attn.v_proj.weight": (key, wide),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if layer > 0 or config["input_norm"]:
        shapes["input_layernorm.weight"] = (hidden,)
    if dual:
        shapes["hidden_norm.weight"] = (hidden,)
    if block["qkv_bias"]:
        sizes = {"q": query, "k": key, "v": key}
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if block["output_bias"]:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if block["mlp_bias"]:
        sizes = {"gate": inner, "up": inner, "down": hidden}
        shapes |= {f"mlp.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if block["qk_norm"]:
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
    return shapes


def random_tensors(config: Config, seed: int = 0) -> Tensors:
    """Values at which ignoring any tensor shows."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name == "d2t":
            order = rng.permutation(config["target_vocab_size"])[: shape[0]]
            tensors[name] = order.astype(np.int32)
            continue
        noise = rng.standard_normal(shape)
        values = 1 + 0.5 * noise if name.endswith("norm.weight") else 0.15 * noise
        tensors[name] = values.astype(np.float32)
    return tensors


def write_plain(folder: Path, config: Config, tensors: Tensors) -> Path:
    """Write the directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
