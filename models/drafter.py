"""The drafter's own parameters, as its file holds them; its graph is in ``drafter_graph.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pspec.models.config import BlockConfig
from pspec.models.drafter_config import DrafterConfig
from pspec.models.layers import Attention, Block, Linear, Mlp, RMSNorm


class FirstBlock(nn.Module):
    """Block 0 of a ``dual-norm`` drafter: q, k, v read the normed token and the normed feature."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = Mlp(config)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        visible: Tensor,
        past_key: Tensor,
        past_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = hidden.shape[-1] // 2
        token, feature = hidden[..., :size], hidden[..., size:]
        both = torch.cat((self.input_layernorm(token), self.hidden_norm(feature)), dim=-1)
        mixed, key, value = self.self_attn(both, cos, sin, visible, past_key, past_value)
        state = feature + mixed
        return state + self.mlp(self.post_attention_layernorm(state)), key, value


class Drafter(nn.Module):
    """A drafter's own parameters, named as in its file; what it borrows is not among them."""

    d2t: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        block, masks = config.block, config.slots - 1
        hidden = block.hidden_size
        rows = {"slot": masks, "shared": 1}
        if masks:
            self.mask_embedding = nn.Parameter(torch.empty(rows[config.mask_embedding], hidden))
        if masks and config.mask_feature in rows:
            shape = rows[config.mask_feature], config.feature_size
            self.mask_feature = nn.Parameter(torch.empty(shape))
        if config.has_fc:
            width = config.feature_size + (hidden if config.fuse == "concat-fc" else 0)
            self.fc = Linear(width, hidden, bias=config.fc_bias)
        if config.embedding == "own":
            self.embed_tokens = nn.Embedding(config.target_vocab_size, hidden)
        first = FirstBlock if config.fuse == "dual-norm" else Block
        kinds = [first] + [Block] * (config.num_layers - 1)
        self.layers = nn.ModuleList(kind(block) for kind in kinds)
        if not config.input_norm:
            self.layers[0].input_layernorm = nn.Identity()
        if config.final_norm:
            self.norm = RMSNorm(hidden, block.norm_eps)
        if config.head == "own":
            self.lm_head = Linear(hidden, config.head_size)
        trimmed = config.head_size < config.target_vocab_size
        table = torch.zeros(config.head_size, dtype=torch.int32) if trimmed else None
        self.register_buffer("d2t", table)
