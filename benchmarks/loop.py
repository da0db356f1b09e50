"""What does the loop cost beside its engine calls? Replay drafters, whose acceptance is known.

Every repetition runs every prompt in every mode, in a rotating order, so that plain and drafted
runs are measured side by side. Prefill is left out. Per run: draft, verify and host time a round,
the speed-up over the plain run of the same repetition, and *efficiency*, that speed-up over
``tau * plain step / (draft + verify)``: 1 where the loop costs no more than plain decoding's does.
A replay drafter's own work counts as host time.

Efficiency cannot see two engines that slow each other down: the times of both are in it. That shows
where a verify call takes longer in ``bundle`` than in ``second-best``, whose trees are as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from _measure import Spread, conditions, footer, percentile, save, spread, table
from _modes import MODES, Answer, answer, modes_of

from pspec.cli_run import run
from pspec.errors import RequestError
from pspec.runtime.generate import Generator

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "List ten things to pack for a week in the mountains.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
)
"""The project's own; Spec-Bench is for results about models, not about the loop."""


@dataclass(frozen=True)
class Run:
    """One answer's rounds; times in seconds."""

    prompt: int
    repeat: int
    mode: str
    tokens: int
    rounds: int
    draft: float
    verify: float
    host: float
    seconds: float
    same: bool

    @property
    def tau(self) -> float:
        """Tokens committed by rounds over rounds."""
        return self.tokens / self.rounds

    @property
    def per_token(self) -> float:
        """Seconds a token, by the benchmark's own clock."""
        return self.seconds / self.tokens


def measured(place: tuple[int, int], mode: str, given: Answer, plain: Sequence[int]) -> Run:
    """A run of prompt and repetition ``place``."""
    stats = given.stats
    return Run(
        prompt=place[0],
        repeat=place[1],
        mode=mode,
        tokens=sum(given.blocks),
        rounds=len(given.blocks),
        draft=stats.draft_seconds,
        verify=stats.verify_seconds,
        host=stats.host_seconds,
        seconds=given.seconds,
        same=given.ids == list(plain),
    )


def speedup(run: Run, plain: Run) -> float:
    """How much faster a token came than in the plain run."""
    return plain.per_token / run.per_token


def efficiency(run: Run, plain: Run) -> float:
    """Speed-up over what the engine calls alone would allow."""
    step = plain.verify / plain.rounds
    allowed = run.tau * step / ((run.draft + run.verify) / run.rounds)
    return speedup(run, plain) / allowed


@dataclass(frozen=True)
class ModeResult:
    """One mode over all runs; times in milliseconds a round."""

    mode: str
    runs: int
    rounds: int
    tau: float
    draft: Spread
    verify: Spread
    host: Spread
    host_p95: float
    host_share: Spread
    speedup: Spread
    efficiency: Spread
    different: int


def summarise(runs: Iterable[Run]) -> list[ModeResult]:
    """Results by mode, each run set beside the plain run of its prompt and repetition."""
    listed = list(runs)
    plain = {(one.prompt, one.repeat): one for one in listed if one.mode == "plain"}
    return [
        _summary(mode, [one for one in listed if one.mode == mode], plain)
        for mode in dict.fromkeys(one.mode for one in listed)
    ]


def _summary(mode: str, runs: Sequence[Run], plain: Mapping[tuple[int, int], Run]) -> ModeResult:
    pairs = [(one, plain[one.prompt, one.repeat]) for one in runs]
    host = [1e3 * one.host / one.rounds for one in runs]
    rounds = sum(one.rounds for one in runs)
    return ModeResult(
        mode=mode,
        runs=len(runs),
        rounds=rounds,
        tau=sum(one.tokens for one in runs) / rounds,
        draft=spread(1e3 * one.draft / one.rounds for one in runs),
        verify=spread(1e3 * one.verify / one.rounds for one in runs),
        host=spread(host),
        host_p95=percentile(host, 95),
        host_share=spread(one.host / (one.draft + one.verify + one.host) for one in runs),
        speedup=spread(speedup(*pair) for pair in pairs),
        efficiency=spread(efficiency(*pair) for pair in pairs),
        different=sum(not one.same for one in runs),
    )


def measure(
    generator: Generator, prompts: Sequence[str], modes: Sequence[str], tokens: int, repeats: int
) -> list[Run]:
    """Warm every mode up, then measure in turns."""
    ids = [generator.encode([{"role": "user", "content": text}]) for text in prompts]
    print("warm-up", flush=True)
    recorded = [answer(generator, "plain", one, tokens).ids for one in ids]
    for mode in modes:
        answer(generator, mode, ids[0], tokens, recorded[0])
    runs = []
    for repeat in range(repeats):
        for number, prompt in enumerate(ids):
            shift = (repeat + number) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                given = answer(generator, mode, prompt, tokens, recorded[number])
                if not given.blocks:
                    raise RequestError(f"prompt {number} is answered by prefill alone")
                runs.append(measured((number, repeat), mode, given, recorded[number]))
        print(f"repetition {repeat + 1} of {repeats}", flush=True)
    return runs


def interference(results: Iterable[ModeResult]) -> float | None:
    """A verify call beside a drafter's engine over one alone, trees being about as large."""
    verify = {one.mode: one.verify.median for one in results}
    if "bundle" not in verify or "second-best" not in verify:
        return None
    return verify["bundle"] / verify["second-best"]


def report(results: Sequence[ModeResult], title: str, foot: str) -> str:
    """The result for people."""
    columns = "mode,rounds,tau,draft ms,verify ms,host ms,host p95,host share,speed-up,efficiency"
    rows = [
        (
            one.mode,
            one.rounds,
            f"{one.tau:.2f}",
            one.draft.text(),
            one.verify.text(),
            one.host.text(3),
            f"{one.host_p95:.3f}",
            f"{one.host_share.median:.2%}",
            one.speedup.text(),
            one.efficiency.text(3),
        )
        for one in results
    ]
    notes = [
        f"{one.different} of {one.runs} {one.mode} runs gave other tokens than the recorded plain "
        "one, a near-tie or a fault: see lossless.py."
        for one in results
        if one.different
    ]
    beside = interference(results)
    if beside is not None:
        notes.append(
            f"Verify beside the drafter's engine takes {beside:.2f} times as long as alone."
        )
    explained = "Times are per round, median [quartiles] over runs."
    return "\n\n".join(
        ["# The loop", title, table(columns.split(","), rows), *notes, explained, foot]
    )


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.IntRange(1, len(PROMPTS)), default=4, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option(
    "--mode",
    "chosen",
    multiple=True,
    type=click.Choice(MODES),
    default=("oracle", "second-best", "lookup", "bundle"),
    show_default=True,
    help="Beside plain; repeatable.",
)
@click.option("--engine", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="One a core if unset.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("bench-loop"), show_default=True
)
def main(
    bundle: Path,
    prompts: int,
    repeats: int,
    max_new_tokens: int,
    chosen: tuple[str, ...],
    engine: str,
    threads: int | None,
    output: Path,
) -> None:
    """Measure and save; see the module."""
    facts = conditions()
    generator = Generator.open(bundle, engine=engine, threads=threads)
    manifest = generator.bundle.manifest
    modes = tuple(mode for mode in modes_of(manifest) if mode in ("plain", *chosen))
    runs = measure(generator, PROMPTS[:prompts], modes, max_new_tokens, repeats)
    results = summarise(runs)
    title = (
        f"{manifest.name}, {manifest.precision}, {manifest.plan.nodes} nodes, {prompts} prompts of "
        f"{max_new_tokens} new tokens, {repeats} repetitions, {threads or 'default'} threads"
    )
    data = {
        "target": manifest.name,
        "precision": manifest.precision,
        "nodes": manifest.plan.nodes,
        "max_new_tokens": max_new_tokens,
        "threads": threads,
        "conditions": facts,
        "verify_beside_drafter": interference(results),
        "results": [asdict(one) for one in results],
        "runs": [asdict(one) for one in runs],
    }
    save(output, "loop", data, report(results, title, footer(facts)))


if __name__ == "__main__":
    run(main, "loop.py")
