"""A drafter that knows the answer: recorded continuations replayed, right or wrong on purpose.

It measures the loop apart from any drafter's quality: the *oracle* proposes what the target will
say, the *anti-oracle* never does, the *second-best* hides the right token at rank 2 of each slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pspec.runtime.tree import Proposal

Kind = Literal["oracle", "anti-oracle", "second-best"]
SECOND_BEST = (0.6, 0.4)
"""Probabilities of the wrong and of the right token in every slot of a second-best drafter."""


class ReplayDrafter:
    """A :class:`~pspec.runtime.drafter.Drafter` over recorded ``ids`` (prompt and answer)."""

    seconds = 0.0

    def __init__(self, kind: Kind, ids: Sequence[int], slots: int, vocab_size: int) -> None:
        self.name: str = kind
        self.slots = slots
        self._kind = kind
        self._ids = list(ids)
        self._vocab_size = vocab_size
        self._seen = 0

    def start(self, token: int) -> None:
        del token
        self._seen = 1

    def observe(self, tokens: Sequence[int], features: NDArray[np.float32] | None) -> None:
        del features
        self._seen += len(tokens)

    def propose(self) -> Proposal | None:
        right = np.asarray(self._ids[self._seen : self._seen + self.slots], np.int32)
        if not right.size:
            return None
        wrong = (right + 1) % self._vocab_size
        if self._kind == "oracle":
            return Proposal(right[:, None], np.zeros((right.size, 1), np.float32))
        if self._kind == "anti-oracle":
            return Proposal(wrong[:, None], np.zeros((right.size, 1), np.float32))
        logprobs = np.log(np.tile(np.asarray(SECOND_BEST, np.float32), (right.size, 1)))
        return Proposal(np.stack((wrong, right), axis=1), logprobs)

    def truncate(self, tokens: int) -> None:
        self._seen = tokens
