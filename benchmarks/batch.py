"""How many tokens per second does batched plain decoding write, and does each row keep its answer?

The same prompts, each with the same budget, at several numbers of rows, in turns. Every answer is
compared with that of one row: identical, a near-tie (the logits of the two tokens that first differ
are closer than 1e-4: other numbers of rows may run other kernels), or different.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from _measure import Spread, conditions, footer, save, spread, table
from _questions import read_questions

from pspec.cli_run import run
from pspec.errors import ConfigError
from pspec.runtime.batch import MAX_ROWS, BatchDecoder, BatchRequest
from pspec.runtime.bundle import Bundle, open_bundle
from pspec.runtime.engines import open_fused
from pspec.runtime.text import Text

ROWS = (1, 8, 32, 64)
NEAR_TIE = 1e-4
"""Logits closer than this may swap between kernels in fp32."""
PROMPTS = tuple(
    f"{task} {topic}."
    for topic in (
        "a lighthouse at night",
        "how bread is baked",
        "the moons of Jupiter",
        "a train that is late",
        "sorting a list of numbers",
        "learning to swim",
        "the price of tea",
        "an old stone bridge",
    )
    for task in (
        "Write a short story about",
        "Explain in three sentences what is interesting about",
        "List ten words that come to mind about",
        "Ask me five questions about",
        "Write a letter to a friend about",
        "Say in one sentence something about",
        "Describe to a child",
        "Give advice to somebody who has to do with",
    )
)
"""The project's own, 64 of them."""


@dataclass(frozen=True)
class Run:
    """One pass over the prompts; times in seconds.

    Attributes:
        rows: sequences at once.
        tokens: written, the first one of each answer included.
        steps: engine calls that wrote one for every busy row.
        prefill: spent reading prompts.
        step: spent in those calls.
        seconds: all of it, by this module's clock.
        answers: in the order of the prompts.
    """

    rows: int
    tokens: int
    steps: int
    prefill: float
    step: float
    seconds: float
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves that of one row.

    Attributes:
        rows: sequences at once.
        prompt: its number.
        place: tokens before the first that differs.
        gap: how far the lesser logit of the two tokens lies below the best, alone; None where one
            answer just ends, which is no matter of rounding.
    """

    rows: int
    prompt: int
    place: int
    gap: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.gap < NEAR_TIE

    def text(self) -> str:
        """A line for people."""
        gap = "one just ends" if self.gap is None else f"gap {self.gap:.1e}"
        return f"- prompt {self.prompt}, {self.rows} rows: differs after {self.place} tokens, {gap}"


@dataclass(frozen=True)
class Rate:
    """One number of rows over all its runs; rates are tokens per second.

    Attributes:
        rows: sequences at once.
        overall: tokens written over all of the time, prompts being read in it.
        stepping: tokens written by steps over the time of steps.
        step_ms: one step.
        busy: rows that a step carried, on average.
        identical: answers that are those of one row, in the worst run.
        near_ties: answers whose first difference is a near-tie.
        different: all others.
    """

    rows: int
    overall: Spread
    stepping: Spread
    step_ms: Spread
    busy: float
    identical: int
    near_ties: int
    different: int


def prompts_of(bundle: Bundle, path: Path | None, limit: int, longest: int) -> list[list[int]]:
    """Prompts of at most ``longest`` tokens, spread over the file.

    Raises:
        ConfigError: when there is none.
    """
    text = Text.open(bundle.folder)
    words = PROMPTS if path is None else [one.text for one in read_questions(path)]
    chats = (text.encode_chat([{"role": "user", "content": one}]) for one in words)
    found = [ids for ids in chats if len(ids) <= longest]
    if not found:
        raise ConfigError(f"no prompt fits {longest} tokens: use a larger --context")
    return found[:: max(len(found) // limit, 1)][:limit]


def measure(decoder: BatchDecoder, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    """Answer all prompts once."""
    start = time.perf_counter()
    answers = list(decoder.run(BatchRequest(ids, tokens) for ids in prompts))
    seconds, stats = time.perf_counter() - start, decoder.stats
    answers.sort(key=lambda answer: answer.index)
    return Run(
        rows=decoder.rows,
        tokens=stats.tokens,
        steps=stats.steps,
        prefill=stats.prefill_seconds,
        step=stats.step_seconds,
        seconds=seconds,
        answers=tuple(tuple(answer.token_ids) for answer in answers),
    )


class Scores:
    """Logits of one sequence alone."""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        self._engine = open_fused(bundle, "target", threads, 1)

    def gap(self, ids: Sequence[int], tokens: Sequence[int]) -> float:
        """How far the least of ``tokens`` lies below the best logit after ``ids``."""
        count = len(ids)
        binding = self._engine.bind_rows(count, 1, range(1))
        binding.inputs["token_ids"][0] = ids
        binding.inputs["position_ids"][0] = np.arange(count)
        binding.inputs["tree_mask"][0] = np.tri(count, dtype=np.bool_)
        binding.inputs["logit_rows"][0, 0] = count - 1
        self._engine.run(binding, 0)
        logits = binding.outputs["logits"][0, 0].astype(np.float64)
        return float(logits.max() - logits[list(tokens)].min())


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Tokens before the first that differs; None for equal answers."""
    pairs = zip(one, other, strict=False)
    shared = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    return min(len(one), len(other)) if shared is None and len(one) != len(other) else shared


def differences(
    given: Run, single: Run, prompts: Sequence[Sequence[int]], scores: Scores
) -> list[Difference]:
    """Answers of a run that are not those of one row."""
    found = []
    for number, (one, other) in enumerate(zip(given.answers, single.answers, strict=True)):
        place = first_difference(one, other)
        if place is None:
            continue
        gap = None
        if place < min(len(one), len(other)):
            gap = scores.gap([*prompts[number], *one[:place]], (one[place], other[place]))
        found.append(Difference(given.rows, number, place, gap))
    return found


def summarise(runs: Iterable[Run], found: Sequence[Sequence[Difference]]) -> list[Rate]:
    """Results by number of rows; ``found`` holds the differences of each run."""
    pairs = list(zip(runs, found, strict=True))
    rates = []
    for rows in sorted({one.rows for one, _ in pairs}):
        some = [pair for pair in pairs if pair[0].rows == rows]
        worst = max((differing for _, differing in some), key=len)
        near = sum(one.near_tie for one in worst)
        same = [one for one, _ in some]
        stepped = [one.tokens - sum(map(bool, one.answers)) for one in same]
        rates.append(
            Rate(
                rows=rows,
                overall=spread(one.tokens / one.seconds for one in same),
                stepping=spread(n / one.step for n, one in zip(stepped, same, strict=True)),
                step_ms=spread(1e3 * one.step / one.steps for one in same),
                busy=stepped[0] / same[0].steps,
                identical=len(same[0].answers) - len(worst),
                near_ties=near,
                different=len(worst) - near,
            )
        )
    return rates


def report(rates: Sequence[Rate], found: Sequence[Difference], title: str, foot: str) -> str:
    """The result for people."""
    columns = "rows,tokens/s,of steps alone,step ms,rows busy,identical,near-ties,different"
    cells = [
        (
            one.rows,
            one.overall.text(1),
            one.stepping.text(1),
            one.step_ms.text(),
            f"{one.busy:.1f}",
            one.identical,
            one.near_ties,
            one.different,
        )
        for one in rates
    ]
    notes = [one.text() for one in dict.fromkeys(found)]
    explained = (
        "Tokens written over all of the time, prompts read in it, and over that of steps alone; "
        "median [quartiles] over repetitions. Identical: to the answer of one row."
    )
    parts = ["# Batched plain decoding", title, table(columns.split(","), cells)]
    parts += ["![rates](batch.png)", explained, *(["\n".join(notes)] if notes else []), foot]
    return "\n\n".join(parts)


def draw(rates: Sequence[Rate], path: Path) -> None:
    """Tokens per second over rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    rows = [one.rows for one in rates]
    for label, values in (
        ("steps alone", [one.stepping for one in rates]),
        ("with prompts", [one.overall for one in rates]),
    ):
        below = [one.median - one.low for one in values]
        above = [one.high - one.median for one in values]
        medians = [one.median for one in values]
        axes.errorbar(rows, medians, yerr=(below, above), marker="o", capsize=2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.set(xlabel="rows", ylabel="tokens per second", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--questions",
    "path",
    type=click.Path(path_type=Path),
    help="Spec-Bench's question.jsonl; the project's own prompts if unset.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Prompts, spread over the file.",
)
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option(
    "--rows",
    "counts",
    multiple=True,
    type=click.IntRange(1, MAX_ROWS),
    default=ROWS,
    show_default=True,
    help="Sequences at once; repeatable. One is always measured.",
)
@click.option(
    "--context",
    type=click.IntRange(3),
    default=512,
    show_default=True,
    help="Longest prompt and answer together; longer prompts are left out.",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="One a core if unset.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("bench-batch"), show_default=True
)
def main(
    bundle: Path,
    path: Path | None,
    limit: int,
    max_new_tokens: int,
    counts: tuple[int, ...],
    context: int,
    repeats: int,
    threads: int | None,
    output: Path,
) -> None:
    """Measure, compare, draw and save; see the module."""
    facts = conditions()
    opened = open_bundle(bundle)
    context = min(context, opened.manifest.plan.max_context)
    prompts = prompts_of(opened, path, limit, context - max_new_tokens)
    runs: list[Run] = []
    for repeat in range(repeats):
        ordered = sorted({1, *counts})
        for rows in ordered if repeat % 2 == 0 else ordered[::-1]:
            # Opened anew, so that the caches of all are not held at once.
            decoder = BatchDecoder(opened, rows, threads, context=context)
            runs.append(measure(decoder, prompts, max_new_tokens))
            del decoder
            rate = runs[-1].tokens / runs[-1].seconds
            print(f"repetition {repeat + 1}, {rows} rows: {rate:.1f} tokens/s", flush=True)
    scores = Scores(opened, threads)
    found = [differences(one, runs[0], prompts, scores) for one in runs]
    rates = summarise(runs, found)
    manifest = opened.manifest
    title = (
        f"{manifest.name}, {manifest.precision}, {len(prompts)} prompts of "
        f"{sum(map(len, prompts))} tokens, at most {max_new_tokens} new ones each, rows of "
        f"{context}, {repeats} repetitions, {threads or 'default'} threads"
    )
    data = {
        "target": manifest.name,
        "precision": manifest.precision,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": max_new_tokens,
        "context": context,
        "threads": threads,
        "conditions": facts,
        "results": [asdict(one) for one in rates],
        "differences": [asdict(one) for some in found for one in some],
        "runs": [{k: v for k, v in asdict(one).items() if k != "answers"} for one in runs],
    }
    output.mkdir(parents=True, exist_ok=True)
    draw(rates, output / "batch.png")
    text = report(rates, [one for some in found for one in some], title, footer(facts))
    save(output, "batch", data, text)


if __name__ == "__main__":
    run(main, "batch.py")
