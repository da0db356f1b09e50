"""How fast are others on the same model? 4-bit SmolLM2-135M-Instruct, greedy, the same token ids.

Part ``plain``: decoding and prefill at fixed prompt lengths, taken from the front of Spec-Bench's
longest prompts. Part ``lookup``: each peer's own prompt lookup against its own plain decoding, on
the first summarization and rag questions. The peers take turns job by job, in a rotating order;
each is a process that is stopped while others compute. End-of-sequence tokens are ignored, so that
every answer is as long. ``install.py`` prepares the work folder.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from catalogue import PEERS, Peer, pspec_peers
from driver import Runner
from protocol import Answer, Start
from results import (
    Run,
    draw,
    lookup_results,
    lookup_table,
    plain_results,
    plain_table,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other benchmarks' helpers
from _measure import conditions, footer, save
from _questions import OTHERS, Question, read_questions, select

from pspec.cli_run import run
from pspec.errors import ConfigError
from pspec.runtime.text import Text

PARTS = ("plain", "lookup")
_SLACK = 64
"""Rows of a context beyond prompt and answer: drafts may reach past the last token."""

_PLAIN_NOTE = (
    "Median [quartiles] over repetitions; ratios are to the fastest decoder of the context, within "
    "each repetition. *agree*: tokens until an answer leaves {}'s."
)
_LOOKUP_NOTE = (
    "Rates are all tokens over all seconds, prefill left out, and *speed-up* is their ratio; *by "
    "answer* has its quartiles. *tau*: tokens of a target call. *other text*: answers that differ "
    "from the peer's own plain ones."
)


@dataclass(frozen=True)
class Prompt:
    """Token ids for every peer."""

    task: str
    place: int
    ids: list[int]


def encoded(text: Text, questions: Iterable[Question]) -> list[Prompt]:
    """Questions as chats, in the model's template."""
    return [
        Prompt(one.task, one.number, text.encode_chat([{"role": "user", "content": one.text}]))
        for one in questions
    ]


def fixed_length(prompts: Sequence[Prompt], length: int, repeats: int) -> list[Prompt]:
    """A prompt for each repetition: the front of one that is long enough, another each time.

    Raises:
        ConfigError: none is.
    """
    fitting = [one for one in prompts if len(one.ids) >= length]
    if not fitting:
        longest = max((len(one.ids) for one in prompts), default=0)
        raise ConfigError(f"--context {length}: the longest question has {longest} tokens")
    return [
        replace(one, task=f"context {length}", ids=one.ids[:length])
        for one in (fitting[repeat % len(fitting)] for repeat in range(repeats))
    ]


def chosen_peers(names: Sequence[str], bundles: tuple[Path, ...], work: Path) -> list[Peer]:
    """The bundles' peers and the named ones, or all that are installed.

    Raises:
        ConfigError: a named one is not installed, or there is nothing to measure.
    """
    missing = [name for name in names if not PEERS[name].installed(work)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not in {work.name}; run benchmarks/peers/install.py with the "
            "same --work first"
        )
    found = [PEERS[name] for name in names] or [p for p in PEERS.values() if p.installed(work)]
    peers = [*pspec_peers(bundles), *found]
    if not peers:
        raise ConfigError(f"no peer in {work.name}: run benchmarks/peers/install.py, or --bundle")
    return peers


def text_of(work: Path, bundles: tuple[Path, ...]) -> Text:
    """The tokenizer: a bundle's, or that of the converted checkpoint.

    Raises:
        ConfigError: neither is there.
    """
    folder = bundles[0] if bundles else work / "models" / "hf"
    if not folder.is_dir():
        raise ConfigError("no tokenizer: give a --bundle, or let install.py convert the model")
    return Text.open(folder)


def run_of(runner: Runner, prompt: Prompt, repeat: int, answer: Answer, count: int) -> Run:
    """A row; a short answer is an error, for it would not compare.

    Raises:
        ConfigError: fewer or more tokens than were asked for.
    """
    if answer.tokens != count or len(answer.ids) != count:
        raise ConfigError(
            f"{runner.name}, {runner.mode}, gave {answer.tokens} tokens instead of {count}"
        )
    return Run(
        peer=runner.name,
        mode=runner.mode,
        task=prompt.task,
        place=prompt.place,
        repeat=repeat,
        prompt_tokens=len(prompt.ids),
        prefill=answer.seconds_prefill,
        decode=answer.seconds_decode,
        rounds=answer.rounds,
        ids=answer.ids,
    )


def turns(
    runners: Sequence[Runner], jobs: Iterable[tuple[int, Prompt]], count: int
) -> Iterator[Run]:
    """Every job by every runner, who comes first changing from job to job."""
    for number, (repeat, prompt) in enumerate(jobs):
        shift = number % len(runners)
        for runner in (*runners[shift:], *runners[:shift]):
            answer = runner.generate(prompt.ids, count)
            yield run_of(runner, prompt, repeat, answer, count)
        print(f"job {number + 1}: {prompt.task}, {len(prompt.ids)} prompt tokens", flush=True)


def start_runners(
    stack: ExitStack, peers: Sequence[Peer], modes: Sequence[str], start: Start, options: Any
) -> list[Runner]:
    """One process for each peer and mode; a peer's modes stand side by side."""
    work: Path = options["work"]
    logs = work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    runners = []
    for peer in peers:
        for mode in modes:
            own = replace(start, model=str(work / peer.model), mode=mode)
            log = logs / f"{peer.name.replace(' ', '-')}-{mode}.log"
            runner = Runner(peer.name, peer.command(work), own, log, options["timeout"])
            runners.append(stack.enter_context(runner))
            limit = runner.about["settings"].get("max_context", start.context)
            if limit < start.context - _SLACK:
                raise ConfigError(
                    f"{peer.name} holds {limit} tokens, {start.context - _SLACK} are needed: "
                    "export it with a larger --max-context"
                )
            print(f"{peer.name}, {mode}: loaded", flush=True)
    return runners


def measure(
    peers: Sequence[Peer],
    parts: dict[str, list[tuple[int, Prompt]]],
    start: Start,
    options: dict[str, Any],
) -> tuple[dict[str, list[Run]], list[dict[str, Any]]]:
    """All runs by part, and what each peer says about itself."""
    modes = ("plain", "lookup") if parts.get("lookup") else ("plain",)
    runs: dict[str, list[Run]] = {}
    with ExitStack() as stack:
        runners = start_runners(stack, peers, modes, start, options)
        about = [
            {"peer": peer.name, "weights": peer.weights, **runner.about}
            for runner, peer in zip(runners[:: len(modes)], peers, strict=True)
        ]
        for part, jobs in parts.items():
            taking = [one for one in runners if part == "lookup" or one.mode == "plain"]
            print(f"part {part}: {len(jobs)} jobs by {len(taking)} runners", flush=True)
            runs[part] = list(turns(taking, jobs, options["max_new_tokens"]))
    return runs, about


def jobs_of(text: Text, options: dict[str, Any]) -> dict[str, list[tuple[int, Prompt]]]:
    """Prompts of each part with their repetition."""
    questions = [
        one for one in read_questions(options["questions"]) if one.task in options["categories"]
    ]
    parts: dict[str, list[tuple[int, Prompt]]] = {}
    if "plain" in options["parts"]:
        everything = encoded(text, questions)
        repeats = options["repeats"]
        columns = [fixed_length(everything, n, repeats) for n in options["contexts"]]
        parts["plain"] = [(i, column[i]) for i in range(repeats) for column in columns]
    if "lookup" in options["parts"]:
        chosen = encoded(text, select(questions, options["per_task"]))
        parts["lookup"] = [(i, one) for i in range(options["lookup_repeats"]) for one in chosen]
    return parts


def report(
    runs: dict[str, list[Run]], about: Sequence[dict[str, Any]], title: str, foot: str
) -> tuple[str, dict[str, Any]]:
    """The result for people, and the summaries behind it."""
    plain = plain_results(runs.get("plain", []), about[0]["peer"])
    lookup = lookup_results(runs["lookup"]) if runs.get("lookup") else []
    sections = ["# Beside others", title]
    if plain:
        sections += [
            "## Plain decoding",
            plain_table(plain),
            _PLAIN_NOTE.format(about[0]["peer"]),
        ]
    if lookup:
        sections += [
            "## Prompt lookup",
            lookup_table(lookup),
            _LOOKUP_NOTE,
        ]
    sections += ["## Peers", *(_described(one) for one in about)]
    data = {"plain": [asdict(one) for one in plain], "lookup": [asdict(one) for one in lookup]}
    return "\n\n".join([*sections, "![bars](peers.png)", foot]), data


def _described(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    settings = "; ".join(f"{name}: {value}" for name, value in about["settings"].items())
    return f"- **{about['peer']}** ({versions}): {about['weights']}. {settings}"


@click.command(help=__doc__)
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("bench-peers"), show_default=True
)
@click.option(
    "--questions",
    required=True,
    type=click.Path(path_type=Path),
    help="Spec-Bench's question.jsonl.",
)
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Measured beside the peers; repeatable.",
)
@click.option(
    "--peer",
    "names",
    multiple=True,
    type=click.Choice(list(PEERS)),
    help="Repeatable; all that are installed if unset.",
)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=click.IntRange(2),
    default=(64, 1024),
    show_default=True,
    help="Prompt tokens of the plain part; repeatable.",
)
@click.option("--repeats", type=click.IntRange(1), default=10, show_default=True)
@click.option("--lookup-repeats", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--category",
    "categories",
    multiple=True,
    type=click.Choice(OTHERS),
    default=("summarization", "rag"),
    show_default=True,
)
@click.option("--per-task", type=click.IntRange(1), default=12, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--drafted", type=click.IntRange(1), default=5, show_default=True, help="Tokens of a draft."
)
@click.option("--ngram", type=click.IntRange(2), default=3, show_default=True, help="Looked up.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for one answer.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("bench-peers-results"),
    show_default=True,
)
def main(output: Path, threads: int, drafted: int, ngram: int, **options: Any) -> None:
    """Measure, draw and save; see the module."""
    facts = conditions()
    work = options["work"] = options["work"].resolve()
    peers = chosen_peers(options["names"], options["bundles"], work)
    parts = jobs_of(text_of(work, options["bundles"]), options)
    longest = max(len(prompt.ids) for jobs in parts.values() for _, prompt in jobs)
    needed = longest + options["max_new_tokens"] + _SLACK
    start = Start("", "plain", threads, needed, drafted, ngram)
    runs, about = measure(peers, parts, start, options)
    title = (
        f"{options['max_new_tokens']} new tokens, {threads} threads; plain: {options['repeats']} "
        f"repetitions; lookup: drafts of at most {drafted} after n-grams of {ngram} (pspec: its "
        f"own choice), {len(parts.get('lookup', []))} answers each"
    )
    text, summary = report(runs, about, title, footer(facts))
    settings = {
        name: options[name]
        for name in ("parts", "contexts", "categories", "per_task", "max_new_tokens", "repeats")
    }
    settings |= {"threads": threads, "drafted": drafted, "ngram": ngram, "context": needed}
    data = {"settings": settings, "conditions": facts, "peers": about, **summary}
    data["runs"] = {part: [asdict(one) for one in rows] for part, rows in runs.items()}
    output.mkdir(parents=True, exist_ok=True)
    plain = plain_results(runs.get("plain", []), about[0]["peer"])
    lookup = lookup_results(runs.get("lookup", []))
    draw(plain, lookup, output / "peers.png")
    save(output, "peers", data, text)


if __name__ == "__main__":
    # Its default would leave stopped runners behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run(main, "run.py")
