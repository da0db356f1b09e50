"""What does a verify call cost in each precision and engine, and where does the time go?

Several bundles of one target side by side, each in the engines named: the calls take turns, an
untimed one, then a timed one, of each in every repetition. Then the fused engine by operator.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
from _measure import conditions, footer, save, table
from cost_curve import Call, Cost, costs, engine_call, filled_engine, measure

from pspec.cli_run import run
from pspec.runtime.bundle import Bundle, open_bundle
from pspec.runtime.fused import FusedEngine
from pspec.runtime.target import Target

NODES = (1, 2, 4, 8, 16, 32)
ENGINES = ("onnxruntime", "standard")
_PROFILED = 20
"""Calls of each number of nodes that a profile adds up."""


def series_name(bundle: Bundle, engine: str) -> str:
    """What a column is called."""
    return f"{bundle.manifest.precision} {'fused' if engine == 'onnxruntime' else engine}"


def random_ids(bundle: Bundle, count: int) -> list[int]:
    """Token ids, the same for every bundle of a target."""
    vocab = bundle.manifest.target.vocab_size
    ids: list[int] = np.random.default_rng(count).integers(0, vocab, count).tolist()
    return ids


def calls_for(
    bundles: Sequence[Bundle],
    engines: Sequence[str],
    filled: int,
    counts: Sequence[int],
    threads: int | None,
) -> list[Call]:
    """A call of each number of nodes, for each bundle and engine, behind ``filled`` tokens."""
    calls = []
    for bundle in bundles:
        ids = random_ids(bundle, filled + max(counts))
        for name in engines:
            engine = filled_engine(bundle, ids[:filled], name, threads)
            new = ids[filled:]
            calls += [engine_call(series_name(bundle, name), engine, new[:n]) for n in counts]
    return calls


def profile(
    bundle: Bundle, filled: int, nodes: int, threads: int | None
) -> list[tuple[str, float]]:
    """Milliseconds of one call of the fused engine by operator, the largest first."""
    ids = random_ids(bundle, filled + nodes)
    with tempfile.TemporaryDirectory() as folder:
        engine = FusedEngine(bundle, "target", threads, profile=Path(folder) / "trace")
        for _ in Target(engine, bundle.manifest.plan).prefill(ids[:filled]):
            pass
        call = engine_call("", engine, ids[filled:])
        for _ in range(_PROFILED):
            call.warm()
        events = json.loads(engine.end_profile().read_text())
    spent = runs_of(events)[-_PROFILED:]
    total: dict[str, float] = defaultdict(float)
    for one in spent:
        for operator, ms in one.items():
            total[operator] += ms / len(spent)
    return sorted(total.items(), key=lambda item: -item[1])


def runs_of(events: Sequence[dict[str, object]]) -> list[dict[str, float]]:
    """Milliseconds by operator of each run in a trace, in order."""
    kernels = [e for e in events if e.get("cat") == "Node" and str(e["name"]).endswith("_time")]
    starts = sorted(float(str(e["ts"])) for e in events if e.get("name") == "model_run")
    runs: list[dict[str, float]] = [defaultdict(float) for _ in starts]
    for event in kernels:
        index = int(np.searchsorted(starts, float(str(event["ts"])), side="right")) - 1
        arguments = event["args"]
        assert isinstance(arguments, dict)
        runs[index][arguments["op_name"]] += float(str(event["dur"])) / 1e3
    return runs


def cost_table(results: Sequence[Cost]) -> str:
    """A row for each fill and number of nodes, a column for each series."""
    series = list(dict.fromkeys(one.series for one in results))
    by_place = {(one.bucket, one.nodes, one.series): one for one in results}
    rows = [
        [filled, nodes, *(by_place[filled, nodes, name].ms.text() for name in series)]
        for filled, nodes in sorted({(one.bucket, one.nodes) for one in results})
    ]
    return table(["filled", "nodes", *(f"{name} ms" for name in series)], rows)


def draw(results: Sequence[Cost], path: Path) -> None:
    """One curve a series, one panel a fill."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    fills = sorted({one.bucket for one in results})
    figure, panels = plt.subplots(
        1, len(fills), figsize=(5 * len(fills), 4.5), layout="constrained", squeeze=False
    )
    for filled, axes in zip(fills, panels[0], strict=True):
        for name in dict.fromkeys(one.series for one in results):
            points = [one for one in results if (one.series, one.bucket) == (name, filled)]
            style = "-" if name.endswith("fused") else "--"
            nodes, ms = [p.nodes for p in points], [p.ms.median for p in points]
            axes.plot(nodes, ms, style, marker="o", markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set(title=f"{filled} tokens in the cache", xlabel="nodes", ylabel="milliseconds")
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


@click.command(help=__doc__)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--engine", "engines", multiple=True, default=ENGINES, show_default=True)
@click.option("--filled", "fills", multiple=True, type=int, default=(64, 960), show_default=True)
@click.option("--nodes", "counts", multiple=True, type=int, default=NODES, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="One a core if unset.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("bench-engines"), show_default=True
)
def main(
    bundles: tuple[Path, ...],
    engines: tuple[str, ...],
    fills: tuple[int, ...],
    counts: tuple[int, ...],
    repeats: int,
    threads: int | None,
    output: Path,
) -> None:
    """Measure, draw and save; see the module."""
    facts = conditions()
    opened = [open_bundle(path) for path in bundles]
    results: list[Cost] = []
    for filled in fills:
        calls = calls_for(opened, engines, filled, counts, threads)
        measure(calls, repeats)
        results += costs(calls, filled)
        print(f"{filled} tokens in the cache: done", flush=True)
    parts = ["# Verify cost by precision and engine", cost_table(results), "![curves](engines.png)"]
    profiles = {}
    for bundle in opened:
        for filled, nodes in ((fills[0], 1), (fills[0], 8), (fills[-1], 8)):
            spent = profile(bundle, filled, nodes, threads)
            title = f"{bundle.manifest.precision}, {nodes} nodes, {filled} tokens in the cache"
            profiles[title] = dict(spent)
            rows = [[name, f"{ms:.2f}"] for name, ms in spent]
            parts += [f"## {title}", table(["operator", "ms"], rows)]
    data = {
        "conditions": facts,
        "threads": threads,
        "repeats": repeats,
        "results": [asdict(one) for one in results],
        "profiles": profiles,
    }
    output.mkdir(parents=True, exist_ok=True)
    draw(results, output / "engines.png")
    save(output, "engines", data, "\n\n".join([*parts, footer(facts)]))


if __name__ == "__main__":
    run(main, "engines.py")
