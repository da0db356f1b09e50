"""The cost curve of a bundle on this device: draft calls, verify calls, and the host's own share.

A sweep visits every case once: a text grows through all cache sizes and, at each measured length,
the drafter's call and a verify call of every size are timed; a little decoding then tells the
host's time. Sweeps are repeated, so that whatever drifts meanwhile hits all cases alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

import numpy as np

from pspec.errors import RequestError
from pspec.progress import Watcher
from pspec.runtime.bundle import Bundle
from pspec.runtime.calibration import Curve, DraftCost, HostCost, Timing, VerifyCost, this_device
from pspec.runtime.decode import Decoding, TreeSettings
from pspec.runtime.drafter import Drafter, ParallelDrafter
from pspec.runtime.engine import Engine
from pspec.runtime.engines import open_engine
from pspec.runtime.lookup import PromptLookup
from pspec.runtime.manifest import ShapePlan
from pspec.runtime.target import Target
from pspec.runtime.tree import Tree

DECODED = 12
"""New tokens of the decoding that tells the host's time."""
_PERIOD = 8
"""The prompt repeats so many tokens: prompt lookup finds something."""


def measure_curve(
    bundle: Bundle,
    engine: str = "auto",
    threads: int | None = None,
    repeats: int = 10,
    watcher: Watcher | None = None,
) -> Curve:
    """Measure a bundle on this device.

    Args:
        bundle: what to measure.
        engine: engine to measure it on.
        threads: CPU threads; None leaves them to the engine.
        repeats: timed sweeps; one before them warms up.
        watcher: hears of the progress.

    Raises:
        RequestError: for a bundle of batches, or with a context too short for a round.
        EngineError: when the engine cannot run here.
    """
    watcher, samples = watcher or Watcher(), Samples()
    watcher.stage("load", f"{bundle.folder}")
    subject = Subject(bundle, engine, threads)
    watcher.stage("warm up", f"{len(subject.lengths)} cache lengths up to {subject.lengths[-1]}")
    subject.sweep(Samples(), backwards=False)
    watcher.stage("measure", f"{repeats} sweeps, up to {subject.counts[-1]} nodes")
    for repeat in range(repeats):
        subject.sweep(samples, backwards=repeat % 2 == 1)
        watcher.advance(repeat + 1, repeats)
    buckets = bundle.manifest.plan.buckets

    def bucket_of(length: int) -> int:
        return next(bucket for bucket in buckets if bucket > length)

    return Curve(
        device=this_device(subject.target.engine.name, threads),
        export=bundle.manifest.checksum,
        date=datetime.now(timezone.utc).date().isoformat(),
        repeats=repeats,
        verify=tuple(
            VerifyCost(nodes, bucket_of(length), length, timing(seconds))
            for (length, nodes), seconds in sorted(samples.verify.items())
        ),
        draft=tuple(
            DraftCost(bucket_of(length), length, timing(seconds))
            for length, seconds in sorted(samples.draft.items())
        ),
        host=tuple(
            HostCost(name, timing(seconds)) for name, seconds in samples.host.items() if seconds
        ),
    )


@dataclass
class Samples:
    """Seconds of each case: by length and nodes, by length, by way of drafting."""

    verify: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    draft: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    host: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Subject:
    """A bundle's engines, ready to be timed."""

    def __init__(self, bundle: Bundle, engine: str, threads: int | None) -> None:
        manifest = bundle.manifest
        if manifest.plan.batch != 1:
            raise RequestError(
                f"the bundle was exported for batches of {manifest.plan.batch}: calibration takes "
                "--batch 1 so far"
            )
        self._plan, self._vocab_size = manifest.plan, manifest.target.vocab_size
        self.lengths = measured_lengths(manifest.plan)
        self.target = Target(open_engine(bundle, "target", engine, threads), manifest.plan)
        self.counts = measured_counts(self.target.engine, manifest.plan)
        self._drafter = None
        if manifest.drafter is not None and manifest.plan.accepted > 1:
            drafting = open_engine(bundle, "drafter", engine, threads)
            self._drafter = ParallelDrafter(drafting, manifest.drafter, manifest.plan)
        rng = np.random.default_rng(0)
        count = manifest.plan.max_context + 1
        self._ids: list[int] = rng.integers(0, self._vocab_size, count).tolist()

    def sweep(self, samples: Samples, *, backwards: bool) -> None:
        """Time every case once."""
        self.target.start()
        if self._drafter is not None:
            self._drafter.start(self._ids[0])
        grown = 0
        for length in self.lengths:
            for _ in self.target.prefill(self._ids[grown:length]):
                pass
            if self._drafter is not None:
                self._drafter.observe(self._ids[grown + 1 : length + 1], None)
                samples.draft[length].append(self._draft_seconds(self._drafter, length + 1))
            self._verify_seconds(self.counts[0])  # the first call here finds other data cached
            for count in reversed(self.counts) if backwards else self.counts:
                samples.verify[length, count].append(self._verify_seconds(count))
            grown = length
        for name, drafter in self._drafters():
            samples.host[name] += self._host_seconds(drafter)

    def _draft_seconds(self, drafter: ParallelDrafter, tokens: int) -> float:
        """The call of a round, once the pairs that had waited for it are fed."""
        drafter.propose()
        drafter.observe(self._ids[:1], None)
        before = drafter.seconds
        drafter.propose()
        after = drafter.seconds
        drafter.truncate(tokens)
        return after - before

    def _verify_seconds(self, count: int) -> float:
        """A call over the flattest tree; what hangs where does not change what it costs."""
        leaves = count - 1
        tree = Tree(self._ids[:1] * count, [-1, *[0] * leaves], [0, *[1] * leaves], [0] * count)
        before = self.target.engine.seconds
        self.target.verify(tree)
        return self.target.engine.seconds - before

    def _host_seconds(self, drafter: Drafter | None) -> Iterator[float]:
        """Of each round that drafted, or of plain ones without a drafter."""
        tree = TreeSettings(self._plan.nodes)
        decoding = Decoding(self.target, drafter, tree, frozenset(), self._vocab_size)
        prompt = (self._ids[:_PERIOD] * 4)[: self._plan.max_context // 2]
        seconds, drafted = 0.0, 0
        for _ in decoding.run(prompt, DECODED):
            stats = decoding.stats
            if stats.rounds and (drafter is None or stats.drafted > drafted):
                yield stats.host_seconds - seconds
            seconds, drafted = stats.host_seconds, stats.drafted

    def _drafters(self) -> Iterator[tuple[str, Drafter | None]]:
        yield "off", None
        if self._plan.accepted > 1:
            yield PromptLookup.name, PromptLookup(self._plan.accepted - 1)
        if self._drafter is not None:
            yield self._drafter.name, self._drafter


def timing(seconds: Sequence[float]) -> Timing:
    """Median and quartiles, in milliseconds."""
    low, median, high = np.percentile(np.asarray(seconds) * 1e3, (25, 50, 75)).tolist()
    return Timing(median, low, high)


def measured_lengths(plan: ShapePlan) -> list[int]:
    """Cached rows at which calls are timed: a bucket hardly entered and as good as full, for each.

    Raises:
        RequestError: when no round fits the context.
    """
    if plan.max_context < plan.accepted + 2:
        raise RequestError(
            f"a context of {plan.max_context} tokens is too short to calibrate with drafts of "
            f"{plan.accepted - 1}: export with a larger --max-context"
        )
    lengths, before = {1}, 1
    for bucket in plan.buckets:
        lengths |= {before, max(bucket - plan.accepted, before)}
        before = bucket
    return sorted(length for length in lengths if length <= plan.max_context - plan.accepted)


def measured_counts(engine: Engine, plan: ShapePlan) -> list[int]:
    """Tree sizes that are timed: powers of two and the plan's own, as shapes of the engine."""
    powers = (1 << power for power in range(plan.nodes.bit_length()))
    return sorted({engine.fit(count) for count in (*powers, plan.nodes)})
