"""Parts shared by every decoder family and by the drafter.

Notation: B rows, N new tokens (tree nodes), S cache slots, H hidden size, Hq query heads,
Hkv key/value heads, G = Hq / Hkv, D head size. Linear weights are stored ``[in, out]``, the layout
ONNX ``MatMul`` wants, so that no graph transposes a weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pspec.models.config import BlockConfig

MASKED = -1e9
"""Score of an invisible key, in fp32: finite, so that no row can turn into NaN."""


class Linear(nn.Module):
    """``x @ weight + bias`` with ``weight[in, out]``."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis; its statistics are computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        size = torch.sqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + self.eps)
        return (wide / size).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x[B, heads, N, D]`` by ``cos, sin [B, 1, N, D]``; channel i pairs with i + D/2."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def attend(
    query: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    visible: Tensor,
) -> Tensor:
    """Grouped-query attention over cached and new rows; neither is copied, no head is repeated.

    Args:
        query: ``[B, Hq, N, D]``, already scaled.
        past_key: ``[B, Hkv, S, D]``.
        past_value: ``[B, Hkv, S, D]``.
        new_key: ``[B, Hkv, N, D]``.
        new_value: ``[B, Hkv, N, D]``.
        visible: ``[B, 1, G * N, S + N]`` bool, the rows tiled once per head of a group.

    Returns:
        ``[B, N, Hq * D]``.
    """
    batch, heads, _, size = query.shape
    kv_heads, slots = past_key.shape[1], past_key.shape[2]
    # Heads of a group share one key matrix: they are stacked as rows of one product.
    stacked = query.reshape(batch, kv_heads, -1, size)
    past = torch.matmul(stacked, past_key.transpose(2, 3))
    new = torch.matmul(stacked, new_key.transpose(2, 3))
    scores = torch.cat((past, new), dim=-1).to(torch.float32)
    weights = torch.softmax(torch.where(visible, scores, MASKED), dim=-1).to(query.dtype)
    mixed = torch.matmul(weights[..., :slots], past_value)
    mixed = mixed + torch.matmul(weights[..., slots:], new_value)
    return mixed.reshape(batch, heads, -1, size).transpose(1, 2).reshape(batch, -1, heads * size)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}


class Mlp(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = self.activation(self.gate_proj(x)) * self.up_proj(x)
        mixed: Tensor = self.down_proj(gated)
        return mixed


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and, where the family has them, q/k norms.

    ``input_size`` is the width that q, k and v read: the hidden size, or twice that in a drafter's
    fused first block.
    """

    def __init__(self, config: BlockConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(input_size, query, bias=config.qkv_bias)
        self.k_proj = Linear(input_size, key, bias=config.qkv_bias)
        self.v_proj = Linear(input_size, key, bias=config.qkv_bias)
        self.o_proj = Linear(query, config.hidden_size, bias=config.output_bias)
        norm = config.qk_norm
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if norm else nn.Identity()

    def _split(self, x: Tensor) -> Tensor:
        """``[B, N, heads * D]`` to ``[B, N, heads, D]``."""
        return x.reshape(x.shape[0], -1, x.shape[-1] // self.head_dim, self.head_dim)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated and scaled query ``[B, Hq, N, D]``, rotated key and value ``[B, Hkv, N, D]``."""
        query = self.q_norm(self._split(self.q_proj(x))).transpose(1, 2)
        key = self.k_norm(self._split(self.k_proj(x))).transpose(1, 2)
        value = self._split(self.v_proj(x)).transpose(1, 2)
        return rotate(query, cos, sin) * self.head_dim**-0.5, rotate(key, cos, sin), value

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        visible: Tensor,
        past_key: Tensor,
        past_value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.project(x, cos, sin)
        mixed = attend(query, past_key, past_value, key, value, visible)
        return self.o_proj(mixed), key, value


class Block(nn.Module):
    """Pre-norm decoder block: new hidden state, and the key and value rows of its tokens."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
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
        mixed, key, value = self.self_attn(
            self.input_layernorm(hidden), cos, sin, visible, past_key, past_value
        )
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value


class RopeTable(nn.Module):
    """``cos, sin [positions, D]`` as buffers, looked up by position id (a Gather in the graph)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, inv_freq: Tensor, positions: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), inv_freq.double())
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``position_ids[B, N]`` int32 to two ``[B, 1, N, D]``."""
        cos = functional.embedding(position_ids, self.cos)
        sin = functional.embedding(position_ids, self.sin)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def linear_weights(module: nn.Module) -> set[str]:
    """Names of the parameters that files hold as ``[out, in]`` and graphs as ``[in, out]``."""
    found = (name for name, part in module.named_modules() if isinstance(part, Linear))
    return {f"{name}.weight" for name in found}
