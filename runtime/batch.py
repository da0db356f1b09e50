"""Many sequences decoded together, plainly: token ids in, finished answers out.

Every row of the batch holds one sequence of its own length. A prompt is prefilled alone, on its
row; then each step adds a token to every row that is busy. A row whose answer is finished takes the
next prompt at once. Where there are no more prompts the last busy row moves into the gap, so that a
step never carries an idle one.

    decoder = BatchDecoder(bundle, rows=32, context=512)
    for answer in decoder.run(BatchRequest(ids, 256) for ids in prompts):
        answers[answer.index] = answer.token_ids

An answer is that of decoding its prompt alone: no row sees another, and each has its own random
numbers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pspec.errors import RequestError
from pspec.runtime.bundle import Bundle
from pspec.runtime.engine import Binding
from pspec.runtime.engines import open_fused
from pspec.runtime.request import GenerationConfig, shown, token_ids, whole
from pspec.runtime.stop import FinishReason, cut

if TYPE_CHECKING:
    from pspec.runtime.fused import FusedEngine

MAX_ROWS = 64
_MOST_THREADS = 1024


@dataclass(frozen=True)
class BatchRequest:
    """One prompt.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: budget; the end of the row's context comes first where it is nearer.
        eos: ids that end the answer; None takes the bundle's, empty means none.
        temperature: 0 is greedy; above, tokens are drawn from the softmax of ``logits / T``.
        seed: of this request's draws, whatever its neighbours are.
        id: the caller's name for it, which comes back with the answer.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 256
    eos: Collection[int] | None = None
    temperature: float = 0.0
    seed: int = 0
    id: Any = None


@dataclass(frozen=True)
class BatchAnswer:
    """A finished answer.

    Attributes:
        index: counts the requests in their order.
        token_ids: the answer, the end token included.
        finish_reason: ``stop`` for an end token, ``length`` for the budget or the context's end.
        prompt_tokens: length of the prompt.
        id: the request's.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    id: Any = None


@dataclass
class BatchStats:
    """What one run did so far.

    Attributes:
        answers: delivered.
        prompt_tokens: prefilled.
        tokens: generated; the first one of each answer comes from its prefill.
        steps: engine calls that added a token to every busy row.
        prefill_seconds: the engine's part of the prompts.
        step_seconds: the engine's part of the steps.
        host_seconds: what choosing tokens and keeping the books took; the caller's own time between
            answers and prompts is in none of these.
    """

    answers: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    host_seconds: float = 0.0


class BatchDecoder:
    """Decodes several sequences at once, over the ``onnxruntime`` engine of a bundle.

    Args:
        bundle: of any ``--batch``; its engine is built where it is missing.
        rows: sequences at once, 1 to 64.
        threads: None takes one a core.
        context: longest prompt and answer together, at most the bundle's, which None takes. The
            cache is made for it.

    Raises:
        RequestError: for a number out of range.
        EngineError: when the engine cannot run here, or its cache does not fit the memory.
    """

    def __init__(
        self,
        bundle: Bundle,
        rows: int,
        threads: int | None = None,
        *,
        context: int | None = None,
    ) -> None:
        longest, target = bundle.manifest.plan.max_context, bundle.manifest.target
        self.rows = whole("rows", rows, 1, MAX_ROWS)
        self.context = whole("context", longest if context is None else context, 2, longest)
        threads = None if threads is None else whole("threads", threads, 1, _MOST_THREADS)
        self.engine = open_fused(bundle, "target", threads, self.rows, self.context)
        self.stats = BatchStats()
        self._batch = _Batch(self.engine, bundle.manifest.plan.chunk)
        self._vocab_size, self._eos = target.vocab_size, target.eos_token_ids
        self._running: _Run | None = None

    def run(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        """Yield answers as they finish; those of one step in the order their prompts came.

        A prompt is asked for when a row is free for it and the answers before it were taken, so
        that ``requests`` may be endless, or depend on the answers. Each run begins anew, ``stats``
        too.

        Raises:
            RequestError: for a request that :meth:`check` refuses, which ends the run: what was
                not finished is lost. Also when another run was begun meanwhile.
        """
        self.stats = BatchStats()
        run = self._running = _Run(self, requests)
        for answer in run.answers():
            yield answer
            run.check()

    def check(self, request: BatchRequest) -> None:
        """See that a request can be served.

        Raises:
            RequestError: for a prompt that is empty, holds what is no token id, or leaves no room
                for an answer, and for settings out of range.
        """
        self._job(request)

    def _job(self, request: BatchRequest) -> _Job:
        if not isinstance(request, BatchRequest):
            raise RequestError(f"expected a BatchRequest, got {shown(request)}")
        config = GenerationConfig(
            max_new_tokens=request.max_new_tokens, temperature=request.temperature
        )
        seed = whole("seed", request.seed, 0)
        eos = self._eos if request.eos is None else request.eos
        eos = frozenset(token_ids(eos, self._vocab_size, "end token"))
        prompt = token_ids(request.prompt, self._vocab_size)
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token")
        room = self.context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, a row holds {self.context}: use at most "
                f"{self.context - 1}, or a larger context"
            )
        budget = min(config.max_new_tokens, room)
        return _Job(prompt, budget, eos, config.temperature, seed, request.id)


@dataclass(frozen=True)
class _Job:
    """A request that can be served; its budget ends with the context."""

    prompt: list[int]
    budget: int
    eos: frozenset[int]
    temperature: float
    seed: int
    id: Any


class _Batch:
    """The rows of a fused engine, driven by token ids; only the first ``n`` are ever busy."""

    def __init__(self, engine: FusedEngine, chunk: int) -> None:
        self._engine, self._chunk = engine, chunk
        self._steps: dict[int, Binding] = {}

    def prefill(self, place: int, ids: Sequence[int]) -> tuple[int, NDArray[np.float32]]:
        """Begin a sequence on row ``place``; its next token, and the logits ``[V]`` for it."""
        engine = self._engine
        engine.truncate(place, 0)
        for start in range(0, len(ids), self._chunk):
            part = ids[start : start + self._chunk]
            count = len(part)
            binding = engine.bind_rows(count, 1, range(place, place + 1))
            inputs, outputs = binding.inputs, binding.outputs
            inputs["token_ids"][0] = part
            inputs["position_ids"][0] = start + np.arange(count)
            inputs["tree_mask"][0] = np.tri(count, dtype=np.bool_)
            inputs["logit_rows"][0, 0] = count - 1
            engine.run(binding, count)
            engine.commit(place, range(count))
        return int(outputs["next_token"][0, 0]), outputs["logits"][0, 0]

    def step(self, tokens: Sequence[int]) -> tuple[list[int], NDArray[np.float32]]:
        """Add a token to each of the first rows; the next tokens, and the logits ``[n, V]``.

        Logits are valid until the next call.
        """
        engine, count = self._engine, len(tokens)
        if count not in self._steps:
            self._steps[count] = engine.bind_rows(1, 1, range(count))
        binding = self._steps[count]
        inputs, outputs = binding.inputs, binding.outputs
        inputs["token_ids"][:, 0] = tokens
        inputs["position_ids"][:, 0] = engine.lengths[:count]
        inputs["tree_mask"][:] = True
        inputs["logit_rows"][:] = 0
        engine.run(binding, 1)
        for row in range(count):
            engine.commit(row, (0,))
        return outputs["next_token"][:, 0].tolist(), outputs["logits"][:, 0]

    def move(self, row: int, place: int) -> None:
        """Let the sequence of ``row`` go on in row ``place``."""
        self._engine.move(row, place)


class _Row:
    """A sequence that is being written."""

    def __init__(self, index: int, job: _Job) -> None:
        self.index, self.job = index, job
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None if job.budget else "length"
        self._draws = np.random.default_rng(job.seed) if job.temperature else None

    def add(self, greedy: int, logits: NDArray[np.floating[Any]]) -> None:
        """Choose the next token: ``greedy``, or by chance from ``logits [V]``."""
        token = greedy
        if self._draws is not None:
            token = draw(logits, self.job.temperature, self._draws.random())
        kept, self.reason = cut([token], self.job.eos, self.job.budget - len(self.tokens))
        self.tokens += kept

    def answer(self) -> BatchAnswer:
        assert self.reason is not None
        prompt_tokens = len(self.job.prompt)
        return BatchAnswer(self.index, self.tokens, self.reason, prompt_tokens, self.job.id)


class _Run:
    """One stream of requests on the rows of a decoder."""

    def __init__(self, decoder: BatchDecoder, requests: Iterable[BatchRequest]) -> None:
        self._decoder = decoder
        self._stats = decoder.stats
        self._waiting = iter(requests)
        self._taken = 0
        self._rows: list[_Row] = []

    def check(self) -> None:
        """See that the rows are still this run's.

        Raises:
            RequestError: another one began.
        """
        if self._decoder._running is not self:
            raise RequestError("another run took the batch over: finish one at a time")

    def answers(self) -> Iterator[BatchAnswer]:
        """Fill the rows, step, deliver, fill again."""
        yield from self._fill(range(self._decoder.rows))
        while self._rows:
            self._step()
            ended = [place for place, row in enumerate(self._rows) if row.reason is not None]
            done = sorted((self._rows[place] for place in ended), key=lambda row: row.index)
            yield from map(self._deliver, done)
            # From the last on: when a gap is closed, the rows behind it are all busy.
            yield from self._fill(ended[::-1])

    def _fill(self, places: Iterable[int]) -> Iterator[BatchAnswer]:
        """Let the next prompts have these places; without one, close the gap."""
        for place in places:
            row = self._next(place)
            while row is not None and row.reason is not None:  # prefill was all of it
                yield self._deliver(row)
                row = self._next(place)
            if row is not None:
                self._rows[place : place + 1] = [row]
            elif place < len(self._rows):
                self._close(place)

    def _next(self, place: int) -> _Row | None:
        """Prefill the next prompt on row ``place``; None if there are no more."""
        try:
            request = next(self._waiting)
        except StopIteration:
            self._waiting = iter(())
            return None
        finally:
            self.check()
        row = self._begin(request)
        if row.reason is None:
            start = time.perf_counter()
            token, logits = self._decoder._batch.prefill(place, row.job.prompt)
            self._stats.prefill_seconds += time.perf_counter() - start
            self._stats.prompt_tokens += len(row.job.prompt)
            self._add([row], [token], logits[None])
        return row

    def _begin(self, request: BatchRequest) -> _Row:
        index = self._taken
        try:
            job = self._decoder._job(request)
        except RequestError as error:
            raise RequestError(f"request {index}: {error}") from error
        self._taken += 1
        return _Row(index, job)

    def _deliver(self, row: _Row) -> BatchAnswer:
        self._stats.answers += 1
        return row.answer()

    def _step(self) -> None:
        start = time.perf_counter()
        tokens, logits = self._decoder._batch.step([row.tokens[-1] for row in self._rows])
        self._stats.step_seconds += time.perf_counter() - start
        self._stats.steps += 1
        self._add(self._rows, tokens, logits)

    def _add(
        self, rows: Sequence[_Row], tokens: Sequence[int], logits: NDArray[np.float32]
    ) -> None:
        start = time.perf_counter()
        for row, token, scores in zip(rows, tokens, logits, strict=True):
            row.add(token, scores)
        self._stats.tokens += len(rows)
        self._stats.host_seconds += time.perf_counter() - start

    def _close(self, place: int) -> None:
        last = len(self._rows) - 1
        if place != last:
            start = time.perf_counter()
            self._decoder._batch.move(last, place)
            self._rows[place] = self._rows[last]
            self._stats.host_seconds += time.perf_counter() - start
        del self._rows[last]


def draw(logits: NDArray[np.floating[Any]], temperature: float, uniform: float) -> int:
    """A token of ``softmax(logits / temperature)``, by inverse distribution function.

    Args:
        logits: ``[V]``.
        temperature: above 0.
        uniform: a random number in ``[0, 1)``; the same one picks the same token.
    """
    weights = logits.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves the best token alone
        weights /= temperature
    below = np.cumsum(np.exp(weights, out=weights), out=weights)
    place = min(uniform * below[-1], np.nextafter(below[-1], 0.0))
    return int(np.searchsorted(below, place, side="right"))
