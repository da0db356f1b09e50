"""Reading a foreign ``config.json``: typed values, and no field that is silently ignored.

Hugging Face configs are full of bookkeeping. A field is either used, known to be harmless
(:data:`HARMLESS`), known and at the value at which it does nothing (:data:`NEUTRAL`), or an error
that names it: a field nobody has looked at might change what the model computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pspec.errors import ConfigError

_HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation
_flash_attn_2_enabled _model_name_or_path _name_or_path architectures attention_dropout
attn_implementation bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty
do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing hidden_dropout id2label initializer_range is_decoder is_llama_config
label2id length_penalty max_length max_sequence_length min_length model_type
no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
output_hidden_states output_scores pad_token_id prefix problem_type remove_invalid_values
repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id suppress_tokens
task_specific_params temperature tf_legacy_loss tie_last_hidden_states tokenizer_class top_k
top_p torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields that say nothing about the forward pass in inference."""

NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "logit_scale": 1,
    "logits_scaling": 1,
    "mlp_bias": False,
    "num_experts": 0,
    "num_local_experts": 0,
    "num_nextn_predict_layers": 0,
    "per_layer_config": None,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1,
    "rope_interleaved": False,
    "sliding_window": None,
    "sliding_window_pattern": None,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
"""Fields that change the computation unless they are null or have this value."""


def refuse_unsupported(config: Mapping[str, Any], used: frozenset[str]) -> None:
    """Raise for every field that is neither in ``used`` nor without effect.

    Raises:
        ConfigError: naming the fields.
    """
    _refuse_layer_types(config.get("layer_types"))
    known = used | HARMLESS | {"layer_types"}
    unknown = [key for key in config if key not in known and key not in NEUTRAL]
    if unknown:
        raise ConfigError(
            f"unknown config field {', '.join(map(repr, sorted(unknown)))}: it might change the "
            "computation; remove it if it does not"
        )
    for key, neutral in NEUTRAL.items():
        value = config.get(key)
        if key not in used and value is not None and value != neutral:
            allowed = "null" if neutral is None else f"{json.dumps(neutral)} or null"
            raise ConfigError(f"{key} is {value!r}, which is not supported; supported: {allowed}")


def _refuse_layer_types(types: object) -> None:
    listed = types if isinstance(types, list) else [types] if types is not None else []
    other = sorted({str(kind) for kind in listed} - {"full_attention"})
    if other:
        raise ConfigError(f"layer_types has {', '.join(other)}; supported: full_attention")


def positive_number(value: object, key: str) -> float:
    """``value`` as a float, or a :class:`ConfigError` that names ``key``."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ConfigError(f"{key} is {value!r}; expected a positive number")


def positive_int(config: Mapping[str, Any], key: str) -> int:
    """A required positive integer of the config, or a :class:`ConfigError` that names it."""
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{key} is missing; expected a positive integer")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{key} is {value!r}; expected a positive integer")
    return value


def flag(config: Mapping[str, Any], key: str) -> bool:
    """A boolean of the config, false when absent or null."""
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; expected true or false")
    return value


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """Ids of a field that may be null, one integer or a list; sorted, without duplicates.

    Raises:
        ConfigError: anything else, or a negative id.
    """
    listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    for item in listed:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise ConfigError(f"{key} is {value!r}; expected token ids or null")
    return tuple(sorted(set(listed)))
