"""Tiny transformers models to compare with, re-randomised so that no quirk hides.

Freshly initialised models are blind: biases are zero, q/k norms are one and the weights so small
that a wrong rotation moves no argmax. Here a dropped bias or a wrong frequency moves logits by
whole units.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 320
"""Rows of the embedding, more than the tokenizer has ids, as in many real models."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A token tree holds what the draft proposes; the target verifies the tree.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 23))",
]


def make_hf(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> tuple[PreTrainedModel, Path]:
    """Save a model of two layers and 64 channels with its tokenizer; return it and the folder.

    Args:
        family: ``llama`` or ``qwen3``.
        folder: created if needed.
        dtype: of the saved weights.
        seed: of the weights.
        **overrides: fields of the config, for example ``attention_bias=True``.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **(settings | overrides))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model, folder


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter values at which ignoring it shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.add_(0.5 * noise)
        else:
            parameter.copy_(0.15 * noise)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 280 ids with three special tokens and a ChatML template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
