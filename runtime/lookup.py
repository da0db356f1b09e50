"""Prompt lookup: the continuation of the last n-gram's most recent earlier occurrence.

No engine and no training (Saxena 2023; ``prompt_lookup_num_tokens`` in transformers): useful where
an answer quotes its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pspec.runtime.tree import Proposal

_COUNTED = 16
"""Tokens of a match that are counted: longer ones are all alike."""


class PromptLookup:
    """A :class:`~pspec.runtime.drafter.Drafter` over the sequence's own tokens."""

    name = "lookup"
    seconds = 0.0

    def __init__(self, slots: int, longest: int = 3) -> None:
        self.slots = slots
        self._longest = longest
        self._ids: list[int] = []
        # Per n-gram length: the gram's latest end, and the one before it.
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}

    def start(self, token: int) -> None:
        self._ids.clear()
        self._ends.clear()
        self._append(token)

    def observe(self, tokens: Sequence[int], features: NDArray[np.float32] | None) -> None:
        del features
        for token in tokens:
            self._append(token)

    def propose(self) -> Proposal | None:
        for size in range(min(self._longest, len(self._ids)), 0, -1):
            _, earlier = self._ends[tuple(self._ids[-size:])]
            if earlier:
                found = self._ids[earlier : earlier + self.slots]
                ids = np.asarray(found, np.int32)[:, None]
                zeros = np.zeros(ids.shape, np.float32)
                return Proposal(ids, zeros, self._match(earlier, size))
        return None

    def _match(self, earlier: int, size: int) -> int:
        """Tokens before ``earlier`` that are also the last ones; ``size`` of them are known to."""
        ids = self._ids
        while size < min(_COUNTED, earlier) and ids[earlier - 1 - size] == ids[-1 - size]:
            size += 1
        return size

    def truncate(self, tokens: int) -> None:
        kept = self._ids[:tokens]
        self.start(kept[0])
        self.observe(kept[1:], None)

    def _append(self, token: int) -> None:
        self._ids.append(token)
        end = len(self._ids)
        for size in range(1, min(self._longest, end) + 1):
            gram = tuple(self._ids[-size:])
            latest, _ = self._ends.get(gram, (0, 0))
            self._ends[gram] = (end, latest)
