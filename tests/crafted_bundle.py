"""A bundle whose answers and rounds are known beforehand (see ``pspec.models.crafted``).

The permutation has one orbit per kind of drafter, and the drafter behaves, after a token, as the
kind of the token's orbit: one bundle holds them all, and the prompt's last token chooses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pspec.export.pipeline import export_bundle
from pspec.export.request import ExportRequest
from pspec.models.crafted import (
    Kind,
    permutation_target,
    proposal_table,
    table_config,
    table_drafter,
)
from pspec.models.decoder import Decoder
from pspec.models.drafter_file import write_drafter
from pspec.models.layers import linear_weights

SLOTS = 4
NODES = 16
MAX_CONTEXT = 96
ORBITS: dict[Kind, range] = {
    "constant": range(10),  # holds token 0, which a constant drafter always proposes
    "oracle": range(10, 20),
    "anti-oracle": range(20, 30),
    "second-best": range(30, 40),
}
VOCAB_SIZE = 40
_STEP = 3


@dataclass(frozen=True)
class CraftedBundle:
    """An exported bundle and its drafter's table."""

    folder: Path
    table: Tensor

    def prompt(self, kind: Kind, length: int) -> list[int]:
        """Tokens of any orbit, the last one of the kind's."""
        rng = random.Random(f"{kind} {length}")
        start = [rng.randrange(VOCAB_SIZE) for _ in range(length - 1)]
        return [*start, rng.choice(ORBITS[kind])]


def successor() -> Tensor:
    """The permutation: each orbit in strides, so that no token follows its neighbour."""
    table = torch.empty(VOCAB_SIZE, dtype=torch.int64)
    for orbit in ORBITS.values():
        for index, token in enumerate(orbit):
            table[token] = orbit[(index + _STEP) % len(orbit)]
    return table


def answer(prompt: list[int], count: int) -> list[int]:
    """What the target says, by the permutation alone."""
    tokens, following = prompt[-1:], successor().tolist()
    for _ in range(count):
        tokens.append(following[tokens[-1]])
    return tokens[1:]


def mixed_table() -> Tensor:
    """Log-probabilities by slot and last token, each token as its orbit's kind says."""
    table = torch.empty(SLOTS, VOCAB_SIZE, VOCAB_SIZE)
    for kind, orbit in ORBITS.items():
        rows = list(orbit)
        table[:, rows] = proposal_table(kind, successor(), SLOTS)[:, rows]
    return table


def crafted_bundle(folder: Path, *, shift: bool) -> CraftedBundle:
    """Export the permutation target and the mixed drafter."""
    save_target(permutation_target(successor()), folder / "target")
    table = mixed_table()
    config = table_config(SLOTS, VOCAB_SIZE, VOCAB_SIZE, shift=shift)
    write_drafter(table_drafter(config, table), folder / "drafter")
    bundle = export_bundle(
        ExportRequest(
            target=str(folder / "target"),
            output=folder / "bundle",
            drafter=folder / "drafter",
            max_context=MAX_CONTEXT,
            nodes=NODES,
        )
    )
    return CraftedBundle(bundle, table)


def save_target(decoder: Decoder, folder: Path) -> None:
    """Write a decoder as transformers would, with a tokenizer of its size."""
    config, block = decoder.config, decoder.config.block
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=block.hidden_size,
            intermediate_size=block.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=block.num_attention_heads,
            num_key_value_heads=block.num_key_value_heads,
            head_dim=block.head_dim,
            rms_norm_eps=block.norm_eps,
            max_position_embeddings=config.max_positions,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    turned = linear_weights(decoder)
    state = {
        name if name.startswith("lm_head") else f"model.{name}": tensor.T
        if name in turned
        else tensor
        for name, tensor in decoder.state_dict().items()
    }
    model.load_state_dict(state)
    model.save_pretrained(folder)
    make_words(config.vocab_size).save_pretrained(folder)


def make_words(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of words of two and three letters, told apart by their capitals."""
    names = ["<pad>", "<s>", "</s>"]
    for token in range(len(names), vocab_size):
        end = "n" if token % 3 else ""
        names.append("BCDFGHJKLMNPQRSTVWXYZ"[token % 21] + "aeiou"[token % 5] + end)
    vocabulary = {name: token for token, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("[A-Z][a-z]+", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
