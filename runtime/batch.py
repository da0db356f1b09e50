"""Plain decoding of many sequences at once: what training data is generated with.

Each row has its own prompt, length and end. A prompt is read alone; then all rows take their steps
together, one token each. A row that finishes gives its place to the next prompt at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pspec.errors import RequestError
from pspec.runtime.bundle import Bundle
from pspec.runtime.engines import open_fused
from pspec.runtime.stop import FinishReason

MAX_ROWS = 64


@dataclass(frozen=True)
class BatchRequest:
    """One prompt.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: budget, at least 1; the context's end comes first where it is nearer.
        eos: ids that end the answer.
        temperature: 0 is greedy; above, tokens are drawn from the softmax of ``logits / T``.
        seed: of this request's draws, whatever its neighbours are.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class BatchAnswer:
    """A finished answer; ``index`` counts the requests in their order."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass
class _Row:
    """A sequence that is being written."""

    index: int
    request: BatchRequest
    draws: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class BatchDecoder:
    """Several rows over one fused engine.

    Args:
        bundle: its engine is built where it is missing.
        rows: sequences at once, 1 to 64.
        threads: None takes one a core.

    Raises:
        RequestError: for a number of rows out of range.
        EngineError: where the caches of so many rows do not fit the memory.
    """

    def __init__(self, bundle: Bundle, rows: int, threads: int | None = None) -> None:
        if not 1 <= rows <= MAX_ROWS:
            raise RequestError(f"rows is {rows}, expected 1 to {MAX_ROWS}")
        self.engine = open_fused(bundle, "target", threads, rows)
        self._plan = bundle.manifest.plan
        self._vocab = bundle.manifest.target.vocab_size
        self._rows = rows

    def run(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        """Answer requests, each as soon as it is finished.

        Raises:
            RequestError: for a request that cannot be answered; rows already running are lost.
        """
        waiting = enumerate(requests)
        active: list[_Row] = []
        while True:
            while len(active) < self._rows and (row := self._next(waiting, len(active))):
                active.append(row)
            if not active:
                return
            for place in reversed(range(len(active))):
                if active[place].finish_reason:
                    yield self._take(active, place)
            if active:
                self._step(active)

    def _next(self, waiting: Iterator[tuple[int, BatchRequest]], place: int) -> _Row | None:
        """Read the next prompt into a free row; its first token comes with that."""
        index, request = next(waiting, (0, None))
        if request is None:
            return None
        self._check(request)
        row = _Row(index, request, np.random.default_rng(request.seed))
        self.engine.truncate(place, 0)
        prompt = np.asarray(request.prompt, np.int32)
        for start in range(0, len(prompt), self._plan.chunk):
            part = prompt[start : start + self._plan.chunk]
            outputs = self._read(part, start, place)
        self._add(row, place, outputs, 0)
        return row

    def _read(self, part: NDArray[np.int32], start: int, place: int) -> Any:
        count = len(part)
        binding = self.engine.bind_rows(count, 1, range(place, place + 1))
        inputs = binding.inputs
        inputs["token_ids"][0] = part
        inputs["position_ids"][0] = start + np.arange(count)
        inputs["tree_mask"][0] = np.tri(count, dtype=np.bool_)
        inputs["logit_rows"][0, 0] = count - 1
        self.engine.run(binding, count)
        self.engine.commit(place, range(count))
        return binding.outputs

    def _step(self, active: Sequence[_Row]) -> None:
        """One token for every row."""
        count = len(active)
        binding = self.engine.bind_rows(1, 1, range(count))
        inputs = binding.inputs
        inputs["token_ids"][:, 0] = [row.tokens[-1] for row in active]
        inputs["position_ids"][:, 0] = self.engine.lengths[:count]
        inputs["tree_mask"][:] = True
        inputs["logit_rows"][:] = 0
        self.engine.run(binding, 1)
        for place, row in enumerate(active):
            self.engine.commit(place, (0,))
            self._add(row, place, binding.outputs, place)

    def _add(self, row: _Row, place: int, outputs: Any, at: int) -> None:
        """Take the token that follows, and see whether it is the last."""
        request = row.request
        if request.temperature:
            token = _draw(outputs["logits"][at, 0], request.temperature, row.draws)
        else:
            token = int(outputs["next_token"][at, 0])
        row.tokens.append(token)
        full = int(self.engine.lengths[place]) >= self._plan.max_context - 1
        if token in request.eos:
            row.finish_reason = "stop"
        elif len(row.tokens) >= request.max_new_tokens or full:
            row.finish_reason = "length"

    def _take(self, active: list[_Row], place: int) -> BatchAnswer:
        """Remove a finished row; the last one moves into its place."""
        row, last = active[place], active.pop()
        if row is not last:
            self.engine.move(len(active), place)
            active[place] = last
        assert row.finish_reason is not None
        return BatchAnswer(row.index, row.tokens, row.finish_reason)

    def _check(self, request: BatchRequest) -> None:
        tokens, longest = len(request.prompt), self._plan.max_context - 1
        if not 1 <= tokens <= longest:
            raise RequestError(f"the prompt has {tokens} tokens, expected 1 to {longest}")
        if not all(0 <= token < self._vocab for token in request.prompt):
            raise RequestError(f"the prompt has token ids outside 0..{self._vocab - 1}")
        if request.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {request.max_new_tokens}, expected 1 or more")
        if not 0 <= request.temperature < float("inf"):
            raise RequestError(f"temperature is {request.temperature}, expected 0 or more")


def _draw(logits: NDArray[np.float32], temperature: float, draws: np.random.Generator) -> int:
    """A token by inverse CDF in the order of ids."""
    scaled = logits.astype(np.float64) / temperature
    chances = np.cumsum(np.exp(scaled - scaled.max()))
    return int(np.searchsorted(chances, draws.random() * chances[-1], side="right"))
