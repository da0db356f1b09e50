"""Drafters: what proposes the tokens that the target verifies.

A drafter hears of every committed token together with the target's feature of the position before
it (the EAGLE pairing), so it never reads the states of its own guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pspec.runtime.engine import Binding, Engine
from pspec.runtime.manifest import ParallelSpec, ShapePlan
from pspec.runtime.tree import Proposal


class Drafter(Protocol):
    """One sequence's source of proposals."""

    name: str
    slots: int
    """Longest continuation it can propose."""

    @property
    def seconds(self) -> float:
        """Time spent inside an engine so far."""
        ...

    def start(self, token: int) -> None:
        """Begin a sequence with its first token."""
        ...

    def observe(self, tokens: Sequence[int], features: NDArray[np.float32] | None) -> None:
        """Committed ``tokens`` and ``features[n, F]`` of the positions just before each."""
        ...

    def propose(self) -> Proposal | None:
        """Candidates for the tokens after the last one observed; None where it has no idea."""
        ...

    def truncate(self, tokens: int) -> None:
        """The sequence was cut to its first ``tokens`` tokens."""
        ...


class ParallelDrafter:
    """The bundle's own drafter: K distributions from one engine call.

    Pairs that wait for the next call (after plain steps, or a prompt) are kept here and fed in
    chunks; only the last call of a round has its proposal read.
    """

    name = "bundle"

    def __init__(self, engine: Engine, spec: ParallelSpec, plan: ShapePlan) -> None:
        self.engine = engine
        self.slots = spec.slots
        self._shift = spec.shift
        self._accepted = plan.accepted
        self._chunk = max(plan.chunk, plan.accepted)
        capacity = self._chunk + self._accepted
        self._tokens = np.zeros(capacity, np.int32)
        self._features = np.zeros((capacity, spec.feature_size), np.float32)
        self._waiting = 0

    @property
    def seconds(self) -> float:
        return self.engine.seconds

    def start(self, token: int) -> None:
        self.engine.truncate(0, 0)
        self._waiting = 0
        if not self._shift:
            self._enqueue([token], None)

    def observe(self, tokens: Sequence[int], features: NDArray[np.float32] | None) -> None:
        for first in range(0, len(tokens), self._accepted):
            part = slice(first, first + self._accepted)
            self._enqueue(tokens[part], None if features is None else features[part])

    def propose(self) -> Proposal | None:
        while self._waiting > self._accepted:
            self._feed(min(self._waiting - 1, self._chunk), self._chunk)
        outputs = self._feed(self._waiting, self._accepted).outputs
        return Proposal(outputs["draft_ids"][0], outputs["draft_logprobs"][0])

    def truncate(self, tokens: int) -> None:
        rows = tokens - 1 if self._shift else tokens
        cached = int(self.engine.lengths[0])
        self._waiting = max(min(self._waiting, rows - cached), 0)
        self.engine.truncate(0, rows)

    def _enqueue(self, tokens: Sequence[int], features: NDArray[np.float32] | None) -> None:
        if self._waiting + len(tokens) > len(self._tokens):
            self._feed(self._chunk, self._chunk)
        stop = self._waiting + len(tokens)
        self._tokens[self._waiting : stop] = tokens
        if features is not None and self._features.shape[1]:
            self._features[self._waiting : stop] = features
        self._waiting = stop

    def _feed(self, count: int, size: int) -> Binding:
        """Run the first ``count`` waiting pairs through a shape of ``size`` and keep their rows."""
        binding = self.engine.bind(size)
        inputs = binding.inputs
        inputs["token_ids"][0, :count] = self._tokens[:count]
        inputs["token_count"][0] = count
        if "feature" in inputs:
            inputs["feature"][0, :count] = self._features[:count]
        self.engine.run(binding, count)
        self.engine.commit(0, range(count))
        left = self._waiting - count
        self._tokens[:left] = self._tokens[count : self._waiting]
        self._features[:left] = self._features[count : self._waiting]
        self._waiting = left
        return binding
