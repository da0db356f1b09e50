"""The drafter's contract: every choice the ParallelSpec paper leaves open is a field here.

One contract covers ParallelSpec on EAGLE, ParallelSpec on Medusa, PARD, P-EAGLE and BiTA-like
drafters. ``docs/drafter-format.md`` documents the directory tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from pspec.errors import ConfigError
from pspec.models.config import BlockConfig, RopeConfig

FORMAT = "pspec-drafter"
VERSION = 1

Fuse = Literal["none", "concat-fc", "dual-norm", "scaled-add", "feature-only"]
MaskFeature = Literal["slot", "shared", "zero", "repeat", "none"]

_COUNTS = ("slots", "num_layers", "target_hidden_size", "target_vocab_size")
_BLOCK_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


class DrafterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``config.json`` of a drafter directory.

    Attributes:
        slots: K, distributions per forward: the last real token plus K - 1 mask slots.
        mask_embedding: ``slot`` ``[K-1, Hd]``, distinct per slot, or ``shared`` ``[1, Hd]``.
        features: ``none``, ``last`` (post-final-norm), or boundaries in HF ``hidden_states``
            numbering (0 is the embedding, ``num_layers`` the last block's output before the norm).
        mask_feature: what stands at a mask slot: learned per slot, learned shared, zero, a repeat
            of the last real feature; ``none`` where mask slots have no feature.
        fuse: how token and feature meet.
        fuse_scale: factor of the projected feature in ``scaled-add``.
        fc_bias: whether ``fc`` has a bias.
        shift: row t pairs token t + 1 with feature t (EAGLE), or token t (PARD, no features).
        target_hidden_size: width of one target hidden state.
        target_vocab_size: token ids the target knows.
        num_layers: decoder blocks.
        block: shape of a block.
        rope: the drafter's own positions, never the target's by default.
        input_norm: whether block 0 norms its input (EAGLE-1 does not).
        final_norm: whether a norm stands before the head (EAGLE-1 has none).
        embedding: the target's token table, or the drafter's own; ``feature-only`` reads none.
        head: the target's, or its own.
        draft_vocab_size: rows of an own head; fewer than the target's need the ``d2t`` map.
        slot_attention: mask slots see the slots before them, or only themselves.
    """

    format: str = FORMAT
    version: int = VERSION
    slots: int
    mask_embedding: Literal["slot", "shared"] = "slot"
    features: Literal["none", "last"] | tuple[int, ...] = "none"
    mask_feature: MaskFeature = "none"
    fuse: Fuse = "none"
    fuse_scale: float = 1.0
    fc_bias: bool = False
    shift: bool = False
    target_hidden_size: int
    target_vocab_size: int
    num_layers: int = 1
    block: BlockConfig
    rope: RopeConfig = RopeConfig()
    input_norm: bool = True
    final_norm: bool = True
    embedding: Literal["target", "own"] = "target"
    head: Literal["target", "own"] = "target"
    draft_vocab_size: int | None = None
    slot_attention: Literal["causal", "blind"] = "causal"

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features, 0 without."""
        count = len(self.features) if isinstance(self.features, tuple) else 1
        return 0 if self.features == "none" else count * self.target_hidden_size

    @property
    def head_size(self) -> int:
        """Rows of the head in use."""
        return self.draft_vocab_size or self.target_vocab_size

    @property
    def reads_tokens(self) -> bool:
        """Whether token embeddings enter at all."""
        return self.fuse != "feature-only"

    @property
    def has_fc(self) -> bool:
        """Whether features pass through ``fc``; feature-only needs it to change the width."""
        if self.fuse == "feature-only":
            return self.feature_size != self.block.hidden_size
        return self.fuse != "none"


def check_drafter(config: DrafterConfig) -> DrafterConfig:
    """Refuse contradictions, naming the field. Returns ``config``.

    Raises:
        ConfigError: for the first contradiction found.
    """
    for wrong, message in _contradictions(config):
        if wrong:
            raise ConfigError(f"drafter config: {message}")
    return config


def _contradictions(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    """One pair a rule, in order: later rules may rely on earlier ones."""
    yield c.format != FORMAT, f"format is {c.format!r}, expected {FORMAT!r}"
    yield c.version != VERSION, f"version is {c.version}, this release reads {VERSION}"
    yield from _number_faults(c)
    yield from _feature_faults(c)
    yield from _vocabulary_faults(c)


def _number_faults(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    block, rope = c.block, c.rope
    counts = {name: getattr(c, name) for name in _COUNTS}
    counts |= {f"block.{name}": getattr(block, name) for name in _BLOCK_COUNTS}
    for name, count in counts.items():
        yield count < 1, f"{name} is {count}, expected at least 1"
    heads, kv_heads = block.num_attention_heads, block.num_key_value_heads
    yield (
        heads % kv_heads != 0,
        f"block.num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
    )
    yield block.head_dim % 2 != 0, f"block.head_dim {block.head_dim} is odd"
    scales = {"block.norm_eps": block.norm_eps, "rope.theta": rope.theta}
    if rope.scaling is not None:
        names = ("factor", "low_freq_factor", "original_max_position_embeddings")
        scales |= {f"rope.scaling.{name}": getattr(rope.scaling, name) for name in names}
    for name, scale in scales.items():
        yield scale <= 0, f"{name} is {scale}, expected a positive number"
    if rope.scaling is not None:
        low, high = rope.scaling.low_freq_factor, rope.scaling.high_freq_factor
        yield high <= low, f"rope.scaling: high_freq_factor {high} is not above {low}, the low one"


def _feature_faults(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    has_features = c.features != "none"
    if isinstance(c.features, tuple):
        names = list(c.features)
        yield not names, 'features is empty, expected "none", "last" or boundaries'
        yield len(set(names)) != len(names), f"features {names} name a boundary twice"
        yield any(name < 0 for name in names), f"features {names}: a boundary is negative"
    yield (
        has_features != (c.fuse != "none"),
        f"fuse {c.fuse!r} does not go with features {c.features!r}",
    )
    yield (
        has_features and not c.shift,
        "features need shift: true, for the bonus token has no feature yet",
    )
    yield (
        (c.mask_feature == "none") != (c.fuse in ("none", "feature-only")),
        f"mask_feature {c.mask_feature!r} does not go with fuse {c.fuse!r}",
    )
    yield c.fc_bias and not c.has_fc, f"fc_bias: true, but fuse {c.fuse!r} has no fc here"
    yield (
        c.fuse_scale != 1.0 and c.fuse != "scaled-add",
        f"fuse_scale {c.fuse_scale} goes with fuse 'scaled-add' only",
    )


def _vocabulary_faults(c: DrafterConfig) -> Iterator[tuple[bool, str]]:
    hidden, width = c.block.hidden_size, c.target_hidden_size
    yield (
        c.embedding == "own" and not c.reads_tokens,
        "embedding: own, but fuse 'feature-only' reads no token",
    )
    borrows = c.head == "target" or (c.embedding == "target" and c.reads_tokens)
    yield (
        borrows and hidden != width,
        f"block.hidden_size {hidden} is not target_hidden_size {width}: only own tables fit",
    )
    rows = c.draft_vocab_size
    yield c.head == "target" and rows is not None, "draft_vocab_size needs head: own"
    yield (
        rows is not None and not 0 < rows <= c.target_vocab_size,
        f"draft_vocab_size {rows} is not in 1..{c.target_vocab_size}",
    )
