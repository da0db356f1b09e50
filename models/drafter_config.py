"""The drafter's contract: every choice the ParallelSpec paper leaves open is a field here.

One contract covers ParallelSpec on EAGLE, ParallelSpec on Medusa, PARD, P-EAGLE and BiTA-like
drafters. ``docs/drafter-format.md`` documents the directory tensor by tensor.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pspec.errors import ConfigError
from pspec.models.config import BlockConfig, RopeConfig

FORMAT = "pspec-drafter"
VERSION = 1

Fuse = Literal["none", "concat-fc", "dual-norm", "scaled-add", "feature-only"]
MaskFeature = Literal["slot", "shared", "zero", "repeat", "none"]


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
        embedding: the target's token table, or the drafter's own.
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


def _contradictions(c: DrafterConfig) -> list[tuple[bool, str]]:
    has_features = c.features != "none"
    block = c.block
    borrows = "target" in (c.embedding, c.head)
    list_features = isinstance(c.features, tuple)
    return [
        (c.format != FORMAT, f"format is {c.format!r}, expected {FORMAT!r}"),
        (c.version != VERSION, f"version {c.version} is not {VERSION}, the one this release reads"),
        (c.slots < 1, f"slots is {c.slots}, expected at least 1"),
        (c.num_layers < 1, f"num_layers is {c.num_layers}, expected at least 1"),
        (list_features and not c.features, 'features is empty, expected "none" or boundaries'),
        (
            list_features and len(set(c.features)) != len(c.features),
            f"features {list(c.features)} name a boundary twice",
        ),
        (
            has_features != (c.fuse != "none"),
            f"fuse {c.fuse!r} does not go with features {c.features!r}",
        ),
        (
            has_features and not c.shift,
            "features need shift: true, for the bonus token has no feature yet",
        ),
        (
            (c.mask_feature == "none") != (not has_features or c.fuse == "feature-only"),
            f"mask_feature {c.mask_feature!r} does not go with fuse {c.fuse!r}",
        ),
        (
            borrows and block.hidden_size != c.target_hidden_size,
            f"hidden_size {block.hidden_size} is not the target's: embedding and head must be own",
        ),
        (
            c.head == "target" and c.draft_vocab_size is not None,
            "draft_vocab_size needs head: own",
        ),
        (
            not 0 < c.head_size <= c.target_vocab_size,
            f"draft_vocab_size {c.draft_vocab_size} is not in 1..{c.target_vocab_size}",
        ),
        (
            block.num_attention_heads % block.num_key_value_heads != 0,
            f"{block.num_attention_heads} heads are no multiple of num_key_value_heads",
        ),
        (block.head_dim % 2 != 0, f"head_dim {block.head_dim} is odd"),
    ]
