"""Runs of the peers, and what tables and pictures make of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other benchmarks' helpers
from _measure import Spread, spread, table


@dataclass(frozen=True)
class Run:
    """One job of one peer.

    Attributes:
        peer: its name.
        mode: ``plain`` or ``lookup``.
        task: of the prompt; ``context N`` for plain decoding at a fixed length.
        place: the prompt's number, the same for all peers.
        repeat: repetition.
        prompt_tokens: tokens of the prompt.
        prefill: seconds until the first token.
        decode: seconds for all others.
        rounds: target calls of the decoding, or None.
        ids: the answer.
    """

    peer: str
    mode: str
    task: str
    place: int
    repeat: int
    prompt_tokens: int
    prefill: float
    decode: float
    rounds: int | None
    ids: list[int]

    @property
    def rate(self) -> float:
        """Tokens a second, prefill and its token left out."""
        return (len(self.ids) - 1) / self.decode

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill

    @property
    def whole(self) -> float:
        """Tokens a second of the whole answer, prefill included."""
        return len(self.ids) / (self.prefill + self.decode)


@dataclass(frozen=True)
class PlainResult:
    """One peer at one context; ``ratio`` is to the fastest, within each repetition."""

    task: str
    peer: str
    decode: Spread
    prefill: Spread
    decode_ratio: Spread
    prefill_ratio: Spread
    agreement: float


@dataclass(frozen=True)
class LookupResult:
    """One peer over one task; speed-ups are over its own plain decoding of the same prompt."""

    task: str
    peer: str
    answers: int
    plain: float
    lookup: float
    speedup: Spread
    total: float
    whole: float
    tau: float | None
    different: int


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens two answers share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def plain_results(runs: Iterable[Run], reference: str) -> list[PlainResult]:
    """By context, the fastest decoder first; ``agreement`` is with the peer ``reference``."""
    listed = list(runs)
    results: list[PlainResult] = []
    for task in dict.fromkeys(run.task for run in listed):
        by_peer: dict[str, dict[int, Run]] = {}
        for run in listed:
            if run.task == task:
                by_peer.setdefault(run.peer, {})[run.repeat] = run
        fastest = max(by_peer, key=lambda name: median(r.rate for r in by_peer[name].values()))
        found = [
            _plain(task, name, by_peer[name], by_peer[fastest], by_peer[reference])
            for name in by_peer
        ]
        results += sorted(found, key=lambda one: -one.decode.median)
    return results


def _plain(
    task: str, peer: str, own: dict[int, Run], best: dict[int, Run], reference: dict[int, Run]
) -> PlainResult:
    return PlainResult(
        task=task,
        peer=peer,
        decode=spread(run.rate for run in own.values()),
        prefill=spread(run.prefill_rate for run in own.values()),
        decode_ratio=spread(run.rate / best[i].rate for i, run in own.items()),
        prefill_ratio=spread(run.prefill_rate / best[i].prefill_rate for i, run in own.items()),
        agreement=median(common_prefix(run.ids, reference[i].ids) for i, run in own.items()),
    )


def lookup_results(runs: Iterable[Run]) -> list[LookupResult]:
    """By task and over all of them."""
    listed = list(runs)
    tasks = list(dict.fromkeys(run.task for run in listed))
    grouped: dict[tuple[str, str], list[Run]] = {}
    for task in [*(tasks if len(tasks) > 1 else ()), "all"]:
        for run in listed:
            if task in (run.task, "all"):
                grouped.setdefault((task, run.peer), []).append(run)
    return [_lookup(task, peer, own) for (task, peer), own in grouped.items()]


def _lookup(task: str, peer: str, runs: Sequence[Run]) -> LookupResult:
    plain = {(run.place, run.repeat): run for run in runs if run.mode == "plain"}
    drafted = [run for run in runs if run.mode == "lookup"]
    pairs = [(run, plain[run.place, run.repeat]) for run in drafted]
    rates = _rate(plain.values()), _rate(drafted)
    whole = [sum(run.prefill + run.decode for run in some) for some in (plain.values(), drafted)]
    rounds = [run.rounds for run in drafted if run.rounds is not None]
    told = len(rounds) == len(drafted)
    return LookupResult(
        task=task,
        peer=peer,
        answers=len(drafted),
        plain=rates[0],
        lookup=rates[1],
        speedup=spread(run.rate / own.rate for run, own in pairs),
        total=rates[1] / rates[0],
        whole=whole[0] / whole[1],
        tau=sum(len(run.ids) - 1 for run in drafted) / sum(rounds) if told else None,
        different=sum(run.ids != own.ids for run, own in pairs),
    )


def _rate(runs: Iterable[Run]) -> float:
    listed = list(runs)
    return sum(len(run.ids) - 1 for run in listed) / sum(run.decode for run in listed)


def plain_table(results: Iterable[PlainResult]) -> str:
    """A row for each context and peer."""
    header = (
        "prompt",
        "peer",
        "decode tok/s",
        "of the fastest",
        "prefill tok/s",
        "of its",
        "agree",
    )
    rows = [
        (
            one.task,
            one.peer,
            one.decode.text(1),
            one.decode_ratio.text(),
            one.prefill.text(0),
            one.prefill_ratio.text(),
            f"{one.agreement:g}",
        )
        for one in results
    ]
    return table(header, rows)


def lookup_table(results: Iterable[LookupResult]) -> str:
    """A row for each task and peer."""
    header = (
        "task",
        "peer",
        "plain tok/s",
        "lookup tok/s",
        "speed-up",
        "by answer",
        "with prefill",
    )
    rows = [
        (
            one.task,
            one.peer,
            f"{one.plain:.1f}",
            f"{one.lookup:.1f}",
            f"{one.total:.2f}",
            one.speedup.text(),
            f"{one.whole:.2f}",
            "-" if one.tau is None else f"{one.tau:.2f}",
            f"{one.different}/{one.answers}",
        )
        for one in results
    ]
    return table((*header, "tau", "other text"), rows)


def draw(plain: Sequence[PlainResult], lookup: Sequence[LookupResult], path: Path) -> None:
    """Bars: decoding at each context, and the speed-up of drafting over all tasks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(task, [one for one in plain if one.task == task]) for task in _tasks(plain)]
    bars = [(task, [(one.peer, one.decode) for one in found]) for task, found in panels]
    titles = [f"plain decoding, {task}, tokens/s" for task, _ in bars]
    whole = [(one.peer, one.speedup) for one in lookup if one.task == "all"]
    if whole:
        bars.append(("all", whole))
        titles.append("lookup over own plain decoding")
    figure, axes = plt.subplots(
        1, len(bars), figsize=(4 * len(bars), 3.2), layout="constrained", squeeze=False
    )
    for title, (_, found), place in zip(titles, bars, axes[0], strict=True):
        values = [value for _, value in found]
        errors = (
            [value.median - value.low for value in values],
            [value.high - value.median for value in values],
        )
        colours = ["tab:blue" if name.startswith("pspec") else "tab:gray" for name, _ in found]
        place.barh(
            [name for name, _ in found],
            [value.median for value in values],
            xerr=errors,
            color=colours,
            capsize=2,
        )
        place.invert_yaxis()
        place.set_title(title, fontsize=9)
        place.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _tasks(results: Iterable[PlainResult]) -> list[str]:
    return list(dict.fromkeys(one.task for one in results))
