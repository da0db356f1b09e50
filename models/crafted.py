"""Models written by hand: a target that counts along a permutation, and drafters that know it.

Weights nobody trained, of the very modules that trained weights go into, so that a bundle made of
them runs every graph and every line of the runtime, and how many tokens a round must commit is
known beforehand. They also show how a parallel drafter works. This one is a table of the last real
token, looked up by one block; its hidden state has four groups of channels:

========= ===== ==========================================================================
group     size  meaning
========= ===== ==========================================================================
token     V + 1 one-hot: the row's own token, the last channel standing for a mask slot
slot      K     one-hot: 0 on real rows, j on mask slot j (written by the embeddings)
last      V     one-hot: the last real token, brought here by attention
logits    V     log-probabilities of the slot, brought here by the MLP, read by the head
========= ===== ==========================================================================

Attention: only real rows have keys, all the same one before rotation. Slot j, j positions behind
the last real row, turns its query back by j positions, so every frequency agrees on that one row
and the softmax has no doubt. MLP: unit (j, i) fires where the slot is j and the last token i, and
adds row ``table[j, i]`` to the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pspec.models.config import BlockConfig, RopeConfig, TargetConfig
from pspec.models.decoder import Decoder
from pspec.models.drafter import Drafter
from pspec.models.drafter_config import DrafterConfig, check_drafter
from pspec.models.layers import Attention, Block, Mlp
from pspec.models.rope import inverse_frequencies

Kind = Literal["oracle", "anti-oracle", "second-best", "constant"]

LEADING: dict[Kind, tuple[float, ...]] = {
    "oracle": (0.9,),
    "anti-oracle": (),
    "second-best": (0.5, 0.4),
    "constant": (0.9,),
}
"""Probabilities of the best candidates; the others share the rest, each 0.8 of the one before."""

_SHARPNESS = 64.0
"""Attention score a frequency adds at full agreement. The row before the last real one falls short
by half of it or more in sum, all other rows by more than that: they get less than e^-32."""
_FIRES = 20.0
"""Gate of a unit that fires; the others' is at most minus this, which silu turns into -4e-8."""


def permutation_target(successor: Tensor, *, num_layers: int = 2, seed: int = 0) -> Decoder:
    """A Llama after whose token i always comes ``successor[i]``.

    Embeddings are orthonormal and the head holds them permuted. Blocks add nothing (their output
    projections are zero) but write keys and values like any others.
    """
    vocab = len(successor)
    block = BlockConfig(
        hidden_size=vocab,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    config = TargetConfig("llama", vocab, num_layers, block, RopeConfig(), False, 2048)
    decoder = Decoder(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.5, generator=generator)
    rows, _ = torch.linalg.qr(decoder.embed_tokens.weight)
    decoder.embed_tokens.weight.copy_(rows)
    assert decoder.lm_head is not None
    decoder.lm_head.weight[:, successor] = rows.T
    return decoder.eval()


def proposal_table(kind: Kind, successor: Tensor, slots: int) -> Tensor:
    """What a drafter of this kind says: log-probabilities ``[K, V, V]`` by slot and last token.

    The anti-oracle ranks the right token last, so that none of m < V candidates is it; the
    second-best drafter has it at rank 2 of every slot; the constant one says the same everywhere.
    """
    vocab = len(successor)
    first = torch.zeros(slots, vocab, dtype=torch.int64)
    if kind != "constant":
        first = torch.stack([_after(successor, steps + 1) for steps in range(slots)])
    ranked = (first[:, :, None] + torch.arange(vocab)) % vocab
    if kind == "anti-oracle":
        ranked = ranked.roll(-1, dims=2)
    if kind == "second-best":
        ranked = torch.cat((ranked[..., [1, 0]], ranked[..., 2:]), dim=2)
    logprobs = _rank_probabilities(LEADING[kind], vocab).log()
    return torch.empty(slots, vocab, vocab).scatter_(2, ranked, logprobs.expand_as(ranked))


def _after(successor: Tensor, steps: int) -> Tensor:
    """Token that comes ``steps`` after each token."""
    token = torch.arange(len(successor))
    for _ in range(steps):
        token = successor[token]
    return token


def _rank_probabilities(leading: tuple[float, ...], vocab: int) -> Tensor:
    tail = 0.8 ** torch.arange(vocab - len(leading), dtype=torch.float32)
    return torch.cat((torch.tensor(leading), tail / tail.sum() * (1 - sum(leading))))


def table_config(slots: int, vocab: int, target_hidden_size: int, *, shift: bool) -> DrafterConfig:
    """A one-block drafter wide enough for a table; ``shift`` pairs tokens with features (EAGLE).

    The features are read by weights of zero: a table needs none.
    """
    hidden, _ = _layout(slots, vocab)
    block = BlockConfig(
        hidden_size=hidden,
        intermediate_size=slots * vocab,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=vocab,
        mlp_bias=True,
    )
    return check_drafter(
        DrafterConfig(
            slots=slots,
            features="last" if shift else "none",
            mask_feature="repeat" if shift else "none",
            fuse="concat-fc" if shift else "none",
            shift=shift,
            target_hidden_size=target_hidden_size,
            target_vocab_size=vocab,
            block=block,
            input_norm=False,
            final_norm=False,
            embedding="own",
            head="own",
        )
    )


@dataclass(frozen=True)
class _Channels:
    """Where each group of channels lies."""

    token: slice
    slot: slice
    last: slice
    logits: slice


def _layout(slots: int, vocab: int) -> tuple[int, _Channels]:
    """Width of the hidden state and its groups."""
    slot, last, logits = vocab + 1, vocab + 1 + slots, 2 * vocab + 1 + slots
    end = logits + vocab
    groups = slice(0, slot), slice(slot, last), slice(last, logits), slice(logits, end)
    return end, _Channels(*groups)


def table_drafter(config: DrafterConfig, table: Tensor) -> Drafter:
    """A drafter of :func:`table_config` whose slot j after token i says ``table[j, i]``.

    Args:
        config: from :func:`table_config`.
        table: log-probabilities ``[K, V, V]``; V even, since it is also the head size.
    """
    slots, vocab, _ = table.shape
    _, at = _layout(slots, vocab)
    drafter = Drafter(config).requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.zero_()
    drafter.embed_tokens.weight[:, at.token] = torch.eye(vocab, vocab + 1)
    drafter.embed_tokens.weight[:, at.slot.start] = 1.0
    if slots > 1:
        drafter.mask_embedding[:, at.token.stop - 1] = 1.0
        drafter.mask_embedding[:, at.slot.start + 1 : at.slot.stop] = torch.eye(slots - 1)
    if config.has_fc:
        drafter.fc.weight[: config.block.hidden_size] = torch.eye(config.block.hidden_size)
    block = drafter.layers[0]
    assert isinstance(block, Block)
    _look_at_last_token(block.self_attn, at, inverse_frequencies(config.rope, vocab))
    # Three channels are one in every row when the norm reads it: it is told to leave them so.
    hidden, eps = config.block.hidden_size, config.block.norm_eps
    block.post_attention_layernorm.weight.fill_((3 / hidden + eps) ** 0.5)
    _write_table(block.mlp, at, table)
    drafter.lm_head.weight[at.logits] = torch.eye(vocab)
    return drafter.eval()


def _look_at_last_token(attention: Attention, at: _Channels, inv_freq: Tensor) -> None:
    """Queries of slot j point j positions back; values carry a row's own token."""
    pairs, vocab = len(inv_freq), 2 * len(inv_freq)
    attention.k_proj.weight[at.slot.start, :pairs] = 1.0
    # Channel i is turned together with i + pairs; the score is divided by sqrt(vocab) later.
    back = torch.outer(torch.arange(at.slot.stop - at.slot.start), inv_freq)
    turned = torch.cat((back.cos(), -back.sin()), dim=1)
    attention.q_proj.weight[at.slot] = (turned * _SHARPNESS * vocab**0.5).float()
    attention.v_proj.weight[at.token] = torch.eye(vocab + 1, vocab)
    attention.o_proj.weight[:, at.last] = torch.eye(vocab)


def _write_table(mlp: Mlp, at: _Channels, table: Tensor) -> None:
    """Unit (j, i): gate positive only where slot j meets last token i; ``down`` holds its row."""
    slots, vocab, _ = table.shape
    mlp.gate_proj.weight[at.slot] = 2 * _FIRES * torch.eye(slots).repeat_interleave(vocab, dim=1)
    mlp.gate_proj.weight[at.last] = 2 * _FIRES * torch.eye(vocab).repeat(1, slots)
    assert mlp.gate_proj.bias is not None
    assert mlp.up_proj.bias is not None
    mlp.gate_proj.bias.fill_(-3 * _FIRES)
    mlp.up_proj.bias.fill_(1 / _FIRES)
    mlp.down_proj.weight[:, at.logits] = table.flatten(0, 1)
