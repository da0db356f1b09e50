"""The parallel drafter: K distributions from one forward, its mask slots baked into the graph.

Graph (B, A, S symbolic; ``l`` is a layer):

================== =================== ======= ==============================================
input              shape               type    meaning
================== =================== ======= ==============================================
token_ids          [B, A]              int32   real tokens since the last call, first count used
token_count        [B]                 int32   real tokens among the A, at least 1
cache_length       [B]                 int32   rows of the cache that count
feature            [B, A, F]           float   the target's features paired with them, if any
past_key.l         [B, Hkv, S, D]      float   and past_value.l
================== =================== ======= ==============================================

================== =================== ======= ==============================================
output             shape               type    meaning
================== =================== ======= ==============================================
draft_ids          [B, K, m]           int32   best candidates of each slot, in target ids
draft_logprobs     [B, K, m]           float   their log-probabilities, descending
new_key.l          [B, Hkv, A, D]      float   and new_value.l: real rows only
================== =================== ======= ==============================================

Mask-slot keys and values are no output, so they can never reach a cache. Inside, a sequence is the
A real rows followed by K - 1 mask slots; slot j continues the last real row's position by j.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from pspec.models.decoder import Decoder, cache_values, pick_rows
from pspec.models.drafter import Drafter
from pspec.models.graph import Stage, Value
from pspec.models.layers import RopeTable
from pspec.models.rope import inverse_frequencies

_TABLE = "embed_tokens.weight"


class Prologue(nn.Module):
    """Rows of the sequence (real, then mask slots), their positions and who sees whom."""

    mask_embedding: Tensor
    mask_feature: Tensor

    def __init__(self, drafter: Drafter, embed: nn.Embedding | None, rope: RopeTable) -> None:
        super().__init__()
        self.config = drafter.config
        self.embed = embed
        self.rope = rope
        self.masks = self.config.slots - 1
        if self.masks:
            self.mask_embedding = drafter.mask_embedding
        if self.masks and self.config.mask_feature in ("slot", "shared"):
            self.mask_feature = drafter.mask_feature
        if self.config.has_fc:
            self.fc = drafter.fc

    def forward(
        self,
        token_ids: Tensor,
        token_count: Tensor,
        cache_length: Tensor,
        past_key: Tensor,
        *feature: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = self._fuse(token_ids, token_count, *feature)
        cos, sin = self.rope(self._positions(token_ids, token_count, cache_length))
        visible = self._visible(token_ids, token_count, cache_length, past_key)
        return hidden, cos, sin, visible

    def _fuse(self, token_ids: Tensor, token_count: Tensor, *features: Tensor) -> Tensor:
        """``[B, A + K - 1, Hd]``, or twice as wide for ``dual-norm``."""
        config = self.config
        if config.fuse == "feature-only":
            only: Tensor = self.fc(features[0]) if config.has_fc else features[0]
            return self._with_masks(only)
        assert self.embed is not None
        tokens = self._with_masks(functional.embedding(token_ids, self.embed.weight))
        if config.fuse == "none":
            return tokens
        feature = self._feature_rows(features[0], token_count)
        if config.fuse == "concat-fc":
            fused: Tensor = self.fc(torch.cat((tokens, feature), dim=-1))
            return fused
        state: Tensor = self.fc(feature)
        if config.fuse == "dual-norm":
            return torch.cat((tokens, state), dim=-1)
        return tokens + config.fuse_scale * state

    def _with_masks(self, real: Tensor) -> Tensor:
        if not self.masks:
            return real
        mask = self.mask_embedding.expand(self.masks, -1).expand(real.shape[0], -1, -1)
        return torch.cat((real, mask), dim=1)

    def _feature_rows(self, feature: Tensor, token_count: Tensor) -> Tensor:
        """``[B, A + K - 1, F]``: the real features, then what stands at mask slots."""
        if not self.masks:
            return feature
        batch, _, size = feature.shape
        kind = self.config.mask_feature
        if kind == "repeat":
            mask = pick_rows(feature, (token_count - 1)[:, None]).expand(batch, self.masks, size)
        elif kind == "zero":
            mask = torch.zeros(batch, self.masks, size, dtype=feature.dtype)
        else:
            mask = self.mask_feature.expand(self.masks, -1).expand(batch, -1, -1)
        return torch.cat((feature, mask), dim=1)

    def _positions(self, token_ids: Tensor, token_count: Tensor, cache_length: Tensor) -> Tensor:
        """Row r of the cache has position r; slot j stands j after the last real row.

        Padding rows stand at the first row's position: the rotary table ends with the context.
        """
        row = torch.arange(token_ids.shape[1], dtype=torch.int32)[None, :]
        real = torch.where(row < token_count[:, None], row, 0) + cache_length[:, None]
        if not self.masks:
            return real
        slot = torch.arange(self.masks, dtype=torch.int32)[None, :]
        return torch.cat((real, slot + (cache_length + token_count)[:, None]), dim=1)

    def _visible(
        self, token_ids: Tensor, token_count: Tensor, cache_length: Tensor, past_key: Tensor
    ) -> Tensor:
        """``[B, 1, G * (A + K - 1), S + A + K - 1]`` bool."""
        batch, rows = token_ids.shape
        masks, slots = self.masks, past_key.shape[2]
        real, mask, slot = (torch.arange(n, dtype=torch.int32) for n in (rows, masks, slots))
        past = (slot[None, :] < cache_length[:, None])[:, None, :]
        past = past.expand(batch, rows + masks, slots)
        causal = (real[None, :] <= real[:, None])[None].expand(batch, rows, rows)
        block = self.config.block
        group = block.num_attention_heads // block.num_key_value_heads
        if not masks:
            return torch.cat([torch.cat((past, causal), dim=2)] * group, dim=1).unsqueeze(1)
        unseen = torch.zeros(batch, rows, masks, dtype=torch.bool)
        counted = (real[None, :] < token_count[:, None])[:, None, :].expand(batch, masks, rows)
        chain = mask[None, :] <= mask[:, None]
        if self.config.slot_attention == "blind":
            chain = mask[None, :] == mask[:, None]
        among = chain[None].expand(batch, masks, masks)
        new = torch.cat((torch.cat((causal, unseen), 2), torch.cat((counted, among), 2)), dim=1)
        return torch.cat([torch.cat((past, new), dim=2)] * group, dim=1).unsqueeze(1)


class RealRows(nn.Module):
    """A block whose keys and values of mask slots go nowhere."""

    def __init__(self, block: nn.Module, masks: int) -> None:
        super().__init__()
        self.block = block
        self.masks = masks

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        visible: Tensor,
        past_key: Tensor,
        past_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        state, key, value = self.block(hidden, cos, sin, visible, past_key, past_value)
        real = key.shape[2] - self.masks
        return state, key[:, :, :real], value[:, :, :real]


class Proposal(nn.Module):
    """Head over the last real row and the mask slots, reduced to the m best of each slot."""

    d2t: Tensor | None

    def __init__(self, drafter: Drafter, head: nn.Module, candidates: int) -> None:
        super().__init__()
        self.config = drafter.config
        self.norm = drafter.norm if self.config.final_norm else nn.Identity()
        self.head = head
        self.candidates = candidates
        self.register_buffer("d2t", drafter.d2t)

    def forward(self, hidden: Tensor, token_count: Tensor) -> tuple[Tensor, Tensor]:
        batch, rows, _ = hidden.shape
        masks = self.config.slots - 1
        picked = (token_count - 1)[:, None]
        if masks:
            slot = (torch.arange(masks, dtype=torch.int32) + (rows - masks)).to(torch.int32)
            picked = torch.cat((picked, slot[None, :].expand(batch, masks)), dim=1)
        states = self.norm(pick_rows(hidden, picked))
        logits = (
            torch.matmul(states, self.head.weight.transpose(0, 1))
            if isinstance(self.head, nn.Embedding)
            else self.head(states)
        )
        logits = logits.to(torch.float32)
        best, ids = torch.topk(logits, self.candidates, dim=-1)
        # Relative to the best one: its probability never underflows, that of the last may.
        top = torch.amax(torch.softmax(logits, dim=-1), dim=-1, keepdim=True)
        ids = ids.to(torch.int32)
        if self.d2t is not None:
            ids = torch.index_select(self.d2t, 0, ids.flatten()).reshape(ids.shape)
        return ids, best - best[..., :1] + torch.log(top)


class DrafterGraph:
    """A :class:`~pspec.models.graph.GraphModel` over a drafter and the target it borrows from."""

    dims = ("batch", "accepted", "slots")

    def __init__(
        self,
        drafter: Drafter,
        target: Decoder,
        *,
        positions: int,
        candidates: int = 16,
    ) -> None:
        self.drafter = drafter
        self.target = target
        config = drafter.config
        self.config = config
        self.candidates = min(candidates, config.head_size)
        inv_freq = inverse_frequencies(config.rope, config.block.head_dim)
        self.rope = RopeTable(inv_freq, positions + config.slots)

    def _cache_shape(self, rows: str) -> tuple[int | str, ...]:
        block = self.config.block
        return ("batch", block.num_key_value_heads, rows, block.head_dim)

    @cached_property
    def inputs(self) -> Sequence[Value]:
        b, config = "batch", self.config
        fixed = [
            Value("token_ids", (b, "accepted"), "int32", "real tokens since the last call"),
            Value("token_count", (b,), "int32", "how many of them count, at least 1"),
            Value("cache_length", (b,), "int32", "rows of the cache that count"),
        ]
        if config.feature_size:
            shape = (b, "accepted", config.feature_size)
            fixed.append(Value("feature", shape, "float32", "target features paired with them"))
        return fixed + cache_values("past", config.num_layers, self._cache_shape("slots"))

    @cached_property
    def outputs(self) -> Sequence[Value]:
        b, config = "batch", self.config
        best = (b, config.slots, self.candidates)
        fixed = [
            Value("draft_ids", best, "int32", "best candidates of each slot, in target ids"),
            Value("draft_logprobs", best, "float32", "their log-probabilities, descending"),
        ]
        return fixed + cache_values("new", config.num_layers, self._cache_shape("accepted"))

    def value(self, name: str) -> Value:
        b, block = "batch", self.config.block
        masks = self.config.slots - 1
        group = block.num_attention_heads // block.num_key_value_heads
        rows = f"accepted + {masks}"
        tiled = f"{group}*accepted + {group * masks}"
        wide = 2 if self.config.fuse == "dual-norm" and name == "hidden.0" else 1
        inner = {
            "cos": Value("cos", (b, 1, rows, block.head_dim), "float32"),
            "sin": Value("sin", (b, 1, rows, block.head_dim), "float32"),
            "visible": Value("visible", (b, 1, tiled, f"slots + {rows}"), "bool"),
        }
        known = {v.name: v for v in (*self.inputs, *self.outputs)} | inner
        return known.get(name) or Value(name, (b, rows, wide * block.hidden_size), "float32")

    @cached_property
    def stages(self) -> Sequence[Stage]:
        config = self.config
        blocks = [self._block(i, layer) for i, layer in enumerate(self.drafter.layers)]
        return [self._prologue(), *blocks, self._proposal(f"hidden.{config.num_layers}")]

    def _prologue(self) -> Stage:
        config = self.config
        own = config.embedding == "own"
        embed = self.drafter.embed_tokens if own else self.target.embed_tokens
        module = Prologue(self.drafter, embed if config.reads_tokens else None, self.rope)
        weights = {key: f"drafter.{key}" for key in module.state_dict()}
        if config.reads_tokens:
            weights["embed.weight"] = f"drafter.{_TABLE}" if own else _TABLE
        inputs = ["token_ids", "token_count", "cache_length", "past_key.0"]
        inputs += ["feature"] if config.feature_size else []
        outputs = ("hidden.0", "cos", "sin", "visible")
        return Stage("embed", "drafter_prologue", module, tuple(inputs), outputs, weights)

    def _block(self, index: int, layer: nn.Module) -> Stage:
        module = RealRows(layer, self.config.slots - 1)
        first = index == 0 and (self.config.fuse == "dual-norm" or not self.config.input_norm)
        return Stage(
            f"layers.{index}",
            "drafter_first_block" if first else "drafter_block",
            module,
            (
                f"hidden.{index}",
                "cos",
                "sin",
                "visible",
                f"past_key.{index}",
                f"past_value.{index}",
            ),
            (f"hidden.{index + 1}", f"new_key.{index}", f"new_value.{index}"),
            {f"block.{key}": f"drafter.layers.{index}.{key}" for key in layer.state_dict()},
        )

    def _proposal(self, hidden: str) -> Stage:
        head: nn.Module = self.target.lm_head or self.target.embed_tokens
        table = "lm_head.weight" if self.target.lm_head is not None else _TABLE
        if self.config.head == "own":
            head, table = self.drafter.lm_head, "drafter.lm_head.weight"
        module = Proposal(self.drafter, head, self.candidates)
        weights = {key: f"drafter.{key}" for key in module.state_dict()} | {"head.weight": table}
        outputs = ("draft_ids", "draft_logprobs")
        return Stage("head", "proposal", module, (hidden, "token_count"), outputs, weights)
