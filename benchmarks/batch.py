"""How many tokens per second does batched plain decoding write, and does each row keep its answer?

Spec-Bench questions through the chat template, each with the same budget, at several numbers of
rows. Every answer is compared with that of one row: equal, or equal up to some token.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from _measure import conditions, footer, save, table
from _questions import read_questions

from pspec.cli_run import run
from pspec.runtime.batch import BatchDecoder, BatchRequest
from pspec.runtime.bundle import Bundle, open_bundle
from pspec.runtime.text import Text

ROWS = (1, 8, 32, 64)


@dataclass(frozen=True)
class Rate:
    """One number of rows.

    Attributes:
        rows: sequences at once.
        tokens_per_s: tokens written, prompts not counted, over all of the time.
        equal: answers that are those of one row.
        answers: all of them.
        first_difference: tokens before the first that differs, the least of all answers; -1: none.
    """

    rows: int
    tokens_per_s: float
    equal: int
    answers: int
    first_difference: int


def requests_of(bundle: Bundle, path: Path, limit: int, budget: int) -> list[BatchRequest]:
    """The first questions that fit the context."""
    text, manifest = Text.open(bundle.folder), bundle.manifest
    eos = frozenset(manifest.target.eos_token_ids)
    found: list[BatchRequest] = []
    for question in read_questions(path):
        ids = text.encode_chat([{"role": "user", "content": question.text}])
        if len(ids) + budget <= manifest.plan.max_context:
            found.append(BatchRequest(ids, budget, eos))
    return found[:: max(len(found) // limit, 1)][:limit]


def answer_all(
    bundle: Bundle, requests: list[BatchRequest], rows: int, threads: int | None
) -> tuple[dict[int, list[int]], float]:
    """Answers by request, and the seconds they took together."""
    decoder = BatchDecoder(bundle, rows, threads)
    start = time.perf_counter()
    answers = {one.index: one.token_ids for one in decoder.run(requests)}
    return answers, time.perf_counter() - start


def rate(
    rows: int, answers: dict[int, list[int]], seconds: float, single: dict[int, list[int]]
) -> Rate:
    """Compare with the answers of one row."""
    differing = [index for index, ids in answers.items() if ids != single[index]]
    shared = [
        next(
            (
                place
                for place, pair in enumerate(zip(answers[i], single[i], strict=False))
                if pair[0] != pair[1]
            ),
            min(len(answers[i]), len(single[i])),
        )
        for i in differing
    ]
    written = sum(map(len, answers.values()))
    equal = len(answers) - len(differing)
    return Rate(rows, written / seconds, equal, len(answers), min(shared, default=-1))


def draw(results: list[Rate], path: Path) -> None:
    """Tokens per second over rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot([one.rows for one in results], [one.tokens_per_s for one in results], marker="o")
    axes.set(xlabel="rows", ylabel="tokens per second", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--questions", "path", required=True, type=click.Path(path_type=Path))
@click.option("--limit", default=64, show_default=True, help="Questions, spread over the file.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--rows", "counts", multiple=True, type=int, default=ROWS, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="One a core if unset.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("bench-batch"), show_default=True
)
def main(
    bundle: Path,
    path: Path,
    limit: int,
    max_new_tokens: int,
    counts: tuple[int, ...],
    threads: int | None,
    output: Path,
) -> None:
    """Measure, draw and save; see the module."""
    facts = conditions()
    opened = open_bundle(bundle)
    requests = requests_of(opened, path, limit, max_new_tokens)
    results: list[Rate] = []
    single: dict[int, list[int]] = {}
    for rows in sorted({1, *counts}):
        answers, seconds = answer_all(opened, requests, rows, threads)
        single = single or answers
        results.append(rate(rows, answers, seconds, single))
        print(f"{rows} rows: {results[-1].tokens_per_s:.0f} tokens/s", flush=True)
    header = ("rows", "tokens/s", "equal to one row", "first difference after")
    cells = [
        (
            one.rows,
            f"{one.tokens_per_s:.0f}",
            f"{one.equal} of {one.answers}",
            one.first_difference if one.first_difference >= 0 else "-",
        )
        for one in results
    ]
    manifest = opened.manifest
    title = (
        f"{manifest.name}, {manifest.precision}, {len(requests)} questions, at most "
        f"{max_new_tokens} new tokens; prompts of {sum(len(r.prompt) for r in requests)} tokens "
        "are read in the same time"
    )
    data = {"conditions": facts, "title": title, "results": [asdict(one) for one in results]}
    output.mkdir(parents=True, exist_ok=True)
    draw(results, output / "batch.png")
    parts = ["# Batched plain decoding", title, table(header, cells), "![rates](batch.png)"]
    save(output, "batch", data, "\n\n".join([*parts, footer(facts)]))


if __name__ == "__main__":
    run(main, "batch.py")
