"""Is every way of drafting lossless? The same greedy tokens as plain decoding and a reference.

The reference is transformers in fp32, the engine's own plain decoding in int8 and int4: there the
quantised target is the target. Spec-Bench questions, first turn, through the chat template.
*Identical* means the same ids; where they first differ the reference's logits may be closer than
1e-4 in fp32, 1e-2 in int8 and int4 (a near-tie: shapes of 1 and of 8 nodes run different kernels),
which is counted, and ends the comparison of that sequence. The replay drafters must also commit,
round by round, exactly what is worked out apart from the loop.

Each question is saved when it is done; the same command goes on where a run was interrupted.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from _measure import conditions, footer, save, table
from _modes import Answer, answer, expected_blocks, modes_of, slots_of
from _questions import TASKS, Question, read_questions, select
from _reference import EngineReference, Reference, check_same_weights, target_path

from pspec.cli_run import run
from pspec.errors import ConfigError
from pspec.files import write_file
from pspec.runtime.bundle import Bundle
from pspec.runtime.generate import Generator
from pspec.runtime.manifest import MANIFEST_FILE

NEAR_TIES = {"fp32": 1e-4, "int8": 1e-2, "int4": 1e-2}
"""Logits closer than this may swap between kernels, by precision."""
SEQUENCES_PER_NEAR_TIE = 200

Verdict = Literal["identical", "near-tie", "failure"]
Gap = Callable[[Sequence[int], Sequence[int]], float]


class ModeRow(msgspec.Struct):
    """One mode's answer to one question.

    Attributes:
        ids: what it said.
        blocks: tokens committed by each round.
        verdict: against the reference and against plain decoding, the worse of the two.
        notes: where it differs, from what and by how much.
    """

    ids: list[int]
    blocks: list[int]
    verdict: Verdict
    notes: list[str]


class Row(msgspec.Struct):
    """One question; without modes it did not fit the context."""

    question: int
    task: str
    prompt_tokens: int
    seconds: float
    reference: list[int] = []
    modes: dict[str, ModeRow] = {}


class Judgement(msgspec.Struct, frozen=True):
    """Two sequences compared."""

    verdict: Verdict
    note: str = ""


def compare(
    ids: Sequence[int], other: Sequence[int], name: str, gap: Gap, tie: float = NEAR_TIES["fp32"]
) -> Judgement:
    """Judge ``ids`` by ``other``; ``gap`` is the reference's, after their common beginning."""
    shared = next(
        (i for i, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1]), None
    )
    if shared is None:
        if len(ids) == len(other):
            return Judgement("identical")
        note = f"{len(ids)} tokens, {name} has {len(other)} that begin alike"
        return Judgement("failure", note)
    found = gap(other[:shared], (ids[shared], other[shared]))
    note = f"differs from {name} at token {shared}, gap {found:.1e}"
    return Judgement("near-tie" if found < tie else "failure", note)


def judge(
    mode: str,
    given: Answer,
    plain: Sequence[int],
    reference: Sequence[int],
    gap: Gap,
    expected: list[int] | None,
    tie: float = NEAR_TIES["fp32"],
) -> ModeRow:
    """Judge one answer by both sequences, by its rounds, and by its own statistics."""
    found = [compare(given.ids, reference, "the reference", gap, tie)]
    if mode != "plain":
        found.append(compare(given.ids, plain, "plain", gap, tie))
    # A replay of a sequence that the target left is no longer what it was meant to be.
    if expected is not None and list(given.ids) == list(plain) and given.blocks != expected:
        found.append(Judgement("failure", f"rounds commit {given.blocks}, expected {expected}"))
    stats = given.stats
    if (stats.rounds, stats.committed) != (len(given.blocks), sum(given.blocks)):
        note = f"stats say {stats.committed} tokens in {stats.rounds} rounds"
        found.append(Judgement("failure", f"{note}, there were {given.blocks}"))
    order: tuple[Verdict, ...] = ("identical", "near-tie", "failure")
    worst = max((judgement.verdict for judgement in found), key=order.index)
    notes = [judgement.note for judgement in found if judgement.note]
    return ModeRow(list(given.ids), given.blocks, worst, notes)


class Store:
    """Rows on disk, one JSON line each after a line of settings."""

    def __init__(self, path: Path, settings: dict[str, Any], *, fresh: bool) -> None:
        self._path = path
        self.rows: dict[int, Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [] if fresh or not path.is_file() else path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if whole and msgspec.json.decode(whole[0]) != settings:
            raise ConfigError(
                f"{path.name} is of another bundle, question file or setting: pass --fresh or "
                "another --output"
            )
        for line in whole[1:]:
            row = msgspec.json.decode(line, type=Row)
            self.rows[row.question] = row
        # Rewritten without what an interruption left of a line.
        write_file(path, b"".join(whole) or msgspec.json.encode(settings) + b"\n")

    def add(self, row: Row) -> None:
        """Keep a row, on disk before anything else happens."""
        self.rows[row.question] = row
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())


class Checker:
    """Asks one bundle and its reference."""

    def __init__(
        self, generator: Generator, reference: Reference | EngineReference, max_new_tokens: int
    ) -> None:
        self._generator = generator
        self._reference = reference
        self._budget = max_new_tokens
        self.modes = modes_of(generator.bundle.manifest)

    def check(self, question: Question) -> Row:
        """Answer a question in every mode and judge each."""
        start = time.perf_counter()
        manifest = self._generator.bundle.manifest
        prompt = self._generator.encode([{"role": "user", "content": question.text}])
        row = Row(question.number, question.task, len(prompt), 0.0)
        if len(prompt) + self._budget > manifest.plan.max_context:
            return row
        eos = manifest.target.eos_token_ids
        row.reference = self._reference.generate(prompt, self._budget, eos)

        def gap(common: Sequence[int], tokens: Sequence[int]) -> float:
            return self._reference.gap([*prompt, *common], tokens)

        plain: list[int] = []
        for mode in self.modes:
            given = answer(self._generator, mode, prompt, self._budget, plain)
            plain = plain or given.ids
            expected = expected_blocks(
                mode,
                len(plain),
                self._budget,
                nodes=manifest.plan.nodes,
                slots=slots_of(manifest),
            )
            tie = NEAR_TIES[manifest.precision]
            row.modes[mode] = judge(mode, given, plain, row.reference, gap, expected, tie)
        row.seconds = time.perf_counter() - start
        return row


class Tally(msgspec.Struct):
    """One line of the result."""

    task: str
    mode: str
    questions: int
    identical: int
    near_ties: int
    failures: int
    tau: float


def tally(rows: Iterable[Row], modes: Sequence[str]) -> list[Tally]:
    """Count by task and mode; ``all`` stands for every task."""
    answered = [row for row in rows if row.modes]
    lines = []
    for task in (*TASKS, "all"):
        group = [row for row in answered if task in (row.task, "all")]
        for mode in modes if group else ():
            given = [row.modes[mode] for row in group]
            counts = Counter(one.verdict for one in given)
            rounds = sum(len(one.blocks) for one in given)
            tau = sum(sum(one.blocks) for one in given) / rounds if rounds else 1.0
            lines.append(
                Tally(
                    task,
                    mode,
                    len(given),
                    counts["identical"],
                    counts["near-tie"],
                    counts["failure"],
                    round(tau, 4),
                )
            )
    return lines


def passed(lines: Iterable[Tally]) -> bool:
    """No failure, and in no mode more near-ties than one in 200 sequences (one is always one)."""
    return all(
        line.failures == 0 and line.near_ties <= max(1, line.questions // SEQUENCES_PER_NEAR_TIE)
        for line in lines
        if line.task == "all"
    )


def remarks(rows: Iterable[Row]) -> list[str]:
    """A line for everything that is not simply identical."""
    lines = []
    for row in rows:
        if not row.modes:
            lines.append(f"- {row.task} {row.question}: skipped, {row.prompt_tokens} prompt tokens")
        for mode, given in row.modes.items():
            if given.notes:
                notes = "; ".join(given.notes)
                lines.append(f"- {row.task} {row.question}, {mode}: {given.verdict}: {notes}")
    return lines


def report(lines: Sequence[Tally], rows: Sequence[Row], title: str, foot: str) -> str:
    """The result for people."""
    header = ("task", "mode", "questions", "identical", "near-ties", "failures", "tau")
    cells = [
        (one.task, one.mode, one.questions, one.identical, one.near_ties, one.failures, tau)
        for one, tau in ((line, f"{line.tau:.2f}") for line in lines)
    ]
    verdict = "passed" if passed(lines) else "FAILED"
    notes = remarks(rows)
    parts = [f"# Lossless: {verdict}", title, table(header, cells)]
    parts += ["\n".join(notes)] if notes else []
    return "\n\n".join([*parts, foot])


def settings_of(generator: Generator, questions: Path, max_new_tokens: int) -> dict[str, Any]:
    """What a stored row depends on."""
    bundle = generator.bundle
    manifest = (bundle.folder / MANIFEST_FILE).read_bytes()
    return {
        "target": bundle.manifest.name,
        "precision": bundle.manifest.precision,
        "engine": generator.engine,
        "nodes": bundle.manifest.plan.nodes,
        "max_context": bundle.manifest.plan.max_context,
        "max_new_tokens": max_new_tokens,
        "modes": list(modes_of(bundle.manifest)),
        "manifest_sha256": sha256(manifest).hexdigest(),
        "questions_sha256": sha256(questions.read_bytes()).hexdigest(),
    }


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--target", default="smollm2", show_default=True, help="What it was exported from.")
@click.option(
    "--questions",
    "path",
    required=True,
    type=click.Path(path_type=Path),
    help="Spec-Bench's question.jsonl.",
)
@click.option("--per-task", default=10, show_default=True, help="First questions of each task.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--engine", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="One a core if unset.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("bench-lossless"),
    show_default=True,
    help="Folder of the results, and of the rows that a run goes on from.",
)
@click.option("--fresh", is_flag=True, help="Forget the rows that are there.")
def main(
    bundle: Path,
    target: str,
    path: Path,
    per_task: int,
    max_new_tokens: int,
    engine: str,
    threads: int | None,
    output: Path,
    fresh: bool,
) -> None:
    """Ask, judge, save; see the module."""
    facts = conditions()
    questions = select(read_questions(path), per_task)
    generator = Generator.open(bundle, engine=engine, threads=threads)
    settings = settings_of(generator, path, max_new_tokens)
    store = Store(output / "lossless.jsonl", settings, fresh=fresh)
    missing = [question for question in questions if question.number not in store.rows]
    print(f"{len(questions)} questions, {len(questions) - len(missing)} done before", flush=True)
    if missing:
        reference = open_reference(generator.bundle, target, engine, threads)
        ask(Checker(generator, reference, max_new_tokens), missing, store)
    rows = [store.rows[question.number] for question in questions]
    lines = tally(rows, settings["modes"])
    title = (
        f"{settings['target']}, {settings['precision']}, {settings['nodes']} nodes, at most "
        f"{max_new_tokens} new tokens, {sum(bool(row.modes) for row in rows)} questions of "
        f"{len(rows)} (the others do not fit {settings['max_context']} tokens)"
    )
    data = {"settings": settings, "conditions": facts, "passed": passed(lines), "lines": lines}
    data |= {"remarks": remarks(rows)}
    save(output, "lossless", msgspec.to_builtins(data), report(lines, rows, title, footer(facts)))
    if not passed(lines):
        sys.exit(1)


def open_reference(
    bundle: Bundle, target: str, engine: str, threads: int | None
) -> Reference | EngineReference:
    """Transformers for weights that are the checkpoint's, else the engine's plain decoding."""
    if bundle.manifest.precision != "fp32":
        return EngineReference(bundle, engine, threads)
    source = target_path(target)
    check_same_weights(source, bundle.manifest)
    return Reference(source, threads)


def ask(checker: Checker, questions: Sequence[Question], store: Store) -> None:
    """Check the questions one by one, with a line for each."""
    for number, question in enumerate(questions, start=1):
        row = checker.check(question)
        store.add(row)
        counts = Counter(given.verdict for given in row.modes.values())
        result = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "skipped"
        print(
            f"[{number}/{len(questions)}] {row.task} {row.question}: {row.prompt_tokens} tokens, "
            f"{result}, {row.seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    run(main, "lossless.py")
