"""What does a verify call cost by its number of nodes, and what do its weights cost in PyTorch?

The bundle's engine with its cache filled, beside transformers with a static cache of the same size
and the same chain of new tokens. The calls take turns: an untimed one, then a timed one, of each in
every repetition. ``--static`` adds the bundle's frozen graphs, where it has one of that size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from _measure import Spread, conditions, footer, save, spread, table
from _reference import StaticSteps, check_same_weights, load_model, target_path
from msgspec.structs import replace

from pspec.cli_run import run
from pspec.errors import ConfigError
from pspec.runtime.bundle import Bundle, open_bundle
from pspec.runtime.engine import Engine
from pspec.runtime.engines import open_engine
from pspec.runtime.manifest import GraphSpec
from pspec.runtime.target import Target

NODES = (1, 2, 4, 8, 16, 32)
BUCKETS = (256, 1024)
_PAUSE = 0.03
"""Seconds before a call, so that the other library's threads have stopped spinning."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one call; ``relative`` is to one node of the same series."""

    series: str
    bucket: int
    nodes: int
    ms: Spread
    relative: float


class Call:
    """One thing to time: ``run`` is measured, ``prepare`` and ``clean`` are not."""

    def __init__(
        self,
        series: str,
        nodes: int,
        run: Callable[[], object],
        clean: Callable[[], object] = lambda: None,
    ) -> None:
        self.series = series
        self.nodes = nodes
        self._run = run
        self._clean = clean
        self.seconds: list[float] = []

    def warm(self) -> None:
        """Run once, untimed."""
        self._run()
        self._clean()

    def measure(self) -> None:
        """Run once more, timed."""
        time.sleep(_PAUSE)
        self.warm()
        start = time.perf_counter()
        self._run()
        self.seconds.append(time.perf_counter() - start)
        self._clean()


def engine_call(series: str, engine: Engine, tokens: Sequence[int]) -> Call:
    """A verify call over a chain of ``tokens`` at the engine's present length."""
    count = len(tokens)
    binding = engine.bind(count, count)

    def run() -> None:
        inputs = binding.inputs
        inputs["token_ids"][0] = tokens
        inputs["position_ids"][0] = engine.lengths[0] + np.arange(count)
        inputs["tree_mask"][0] = np.tri(count, dtype=np.bool_)
        inputs["logit_rows"][0] = np.arange(count)
        engine.run(binding, count)

    return Call(series, count, run)


def torch_call(series: str, steps: StaticSteps, tokens: Sequence[int]) -> Call:
    """The same in transformers; what it added to the cache is taken back, untimed."""
    ids = torch.tensor([list(tokens)])
    return Call(series, len(tokens), lambda: steps.step(ids), lambda: steps.rewind(len(tokens)))


def filled_engine(bundle: Bundle, prompt: Sequence[int], name: str, threads: int | None) -> Engine:
    """The bundle's engine after a prefill."""
    engine = open_engine(bundle, "target", name, threads)
    for _ in Target(engine, bundle.manifest.plan).prefill(prompt):
        pass
    return engine


def static_engines(
    bundle: Bundle, bucket: int, filled: int, threads: int | None
) -> Iterator[tuple[int, Engine]]:
    """An engine over each frozen verify graph of a bucket, its cache filled with some row."""
    from pspec.runtime.standard import StandardEngine

    plan = replace(bundle.manifest.plan, buckets=(bucket,))
    for graph in frozen_graphs(bundle.manifest.graphs, bucket):
        count = graph.sizes["nodes"]
        # The engine runs the graph that has no sizes: here, this one.
        manifest = replace(bundle.manifest, plan=plan, graphs=(replace(graph, sizes={}),))
        engine = StandardEngine(Bundle(bundle.folder, manifest), "target", threads)
        engine.run(engine.bind(count, count), 1)
        engine.commit(0, [0] * filled)  # what the rows hold does not change what they cost
        yield count, engine


def frozen_graphs(graphs: Sequence[GraphSpec], bucket: int) -> list[GraphSpec]:
    """Static target graphs of a bucket that give logits of every node, smallest first."""
    fitting = [
        graph
        for graph in graphs
        if graph.role == "target"
        and graph.sizes.get("slots") == bucket
        and graph.sizes["rows"] == graph.sizes["nodes"]
    ]
    return sorted(fitting, key=lambda graph: graph.sizes["nodes"])


def calls_for(
    bundle: Bundle,
    model: Any,
    bucket: int,
    counts: Sequence[int],
    options: Mapping[str, Any],
) -> list[Call]:
    """Everything to be timed at one bucket."""
    filled = bucket - max(counts)
    rng = np.random.default_rng(bucket)
    vocab = bundle.manifest.target.vocab_size
    ids: list[int] = rng.integers(0, vocab, bucket).tolist()
    prompt, new = ids[:filled], ids[filled:]
    engine = filled_engine(bundle, prompt, options["engine"], options["threads"])
    calls = [engine_call("pspec", engine, new[:count]) for count in counts]
    if model is not None:
        steps = StaticSteps(model, prompt, bucket)
        calls += [torch_call("transformers", steps, new[:count]) for count in counts]
    if options["static"]:
        engines = static_engines(bundle, bucket, filled, options["threads"])
        calls += [engine_call("pspec static", one, new[:count]) for count, one in engines]
    return calls


def measure(calls: Sequence[Call], repeats: int) -> None:
    """Warm up, then let the calls take turns: same sizes side by side, the order turned around."""
    ordered = sorted(calls, key=lambda call: call.nodes)
    for call in ordered:
        call.warm()
    for repeat in range(repeats):
        for call in ordered if repeat % 2 == 0 else reversed(ordered):
            call.measure()


def costs(calls: Sequence[Call], bucket: int) -> list[Cost]:
    """Milliseconds, and relative to one node."""
    found = {(call.series, call.nodes): spread(1e3 * s for s in call.seconds) for call in calls}
    return [
        Cost(series, bucket, nodes, ms, ms.median / found[series, 1].median)
        if (series, 1) in found
        else Cost(series, bucket, nodes, ms, float("nan"))
        for (series, nodes), ms in found.items()
    ]


def report(results: Sequence[Cost], title: str, foot: str) -> str:
    """The result for people: a row for each bucket and number of nodes."""
    series = list(dict.fromkeys(one.series for one in results))
    header = ["cache", "nodes"]
    for name in series:
        header += [f"{name} ms", f"{name} / 1 node"]
    by_place = {(one.bucket, one.nodes, one.series): one for one in results}
    rows = []
    for bucket, nodes in sorted({(one.bucket, one.nodes) for one in results}):
        row: list[object] = [bucket, nodes]
        for name in series:
            cost = by_place.get((bucket, nodes, name))
            row += [cost.ms.text(), f"{cost.relative:.2f}"] if cost else ["-", "-"]
        rows.append(row)
    explained = "Milliseconds of one call, median [quartiles] over repetitions."
    picture = "![curves](cost_curve.png)"
    return "\n\n".join(["# Verify cost", title, table(header, rows), picture, explained, foot])


def draw(results: Sequence[Cost], path: Path) -> None:
    """One curve a series and bucket."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    colours = {"pspec": "tab:blue", "transformers": "tab:orange", "pspec static": "tab:green"}
    buckets = sorted({one.bucket for one in results})
    for series, bucket in dict.fromkeys((one.series, one.bucket) for one in results):
        points = [one for one in results if (one.series, one.bucket) == (series, bucket)]
        below = [one.ms.median - one.ms.low for one in points]
        above = [one.ms.high - one.ms.median for one in points]
        axes.errorbar(
            [one.nodes for one in points],
            [one.ms.median for one in points],
            yerr=(below, above),
            color=colours[series],
            linestyle=("-", "--", ":", "-.")[buckets.index(bucket) % 4],
            marker="x" if series == "pspec static" else "o",
            markersize=4,
            capsize=2,
            label=f"{series}, cache of {bucket}",
        )
    axes.set_xscale("log", base=2)
    nodes = sorted({one.nodes for one in results})
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set(xlabel="nodes (new tokens of one call)", ylabel="milliseconds", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def check_buckets(bundle: Bundle, buckets: Sequence[int], nodes: int) -> None:
    """Refuse a cache that the bundle does not have or that the new rows would fill.

    Raises:
        ConfigError: naming what the bundle has.
    """
    there = bundle.manifest.plan.buckets
    for bucket in buckets:
        if bucket not in there or bucket <= nodes:
            raise ConfigError(
                f"--bucket {bucket}: the bundle's are {', '.join(map(str, there))}, and it must "
                f"hold more than {nodes} rows; a larger one needs pspec-export --max-context"
            )


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--target", default="smollm2", show_default=True, help="What it was exported from.")
@click.option("--bucket", "buckets", multiple=True, default=BUCKETS, show_default=True)
@click.option(
    "--nodes",
    "counts",
    multiple=True,
    type=click.IntRange(1),
    default=NODES,
    show_default=True,
    help="New tokens of a call; repeatable.",
)
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
@click.option("--engine", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="One a core if unset, in both libraries.")
@click.option("--static", is_flag=True, help="Also time the bundle's frozen graphs.")
@click.option("--no-torch", is_flag=True, help="Leave transformers out.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("bench-cost-curve"),
    show_default=True,
)
def main(
    bundle: Path,
    target: str,
    buckets: tuple[int, ...],
    counts: tuple[int, ...],
    repeats: int,
    no_torch: bool,
    output: Path,
    **options: Any,
) -> None:
    """Measure, draw and save; see the module."""
    facts = conditions()
    opened = open_bundle(bundle)
    check_buckets(opened, buckets, max(counts))
    model = None
    if not no_torch:
        source = target_path(target)
        check_same_weights(source, opened.manifest)
        model = load_model(source, options["threads"])
    results: list[Cost] = []
    for bucket in buckets:
        calls = calls_for(opened, model, bucket, sorted(counts), options)
        measure(calls, repeats)
        results += costs(calls, bucket)
        print(f"cache of {bucket}: done", flush=True)
    manifest = opened.manifest
    title = (
        f"{manifest.name}, {manifest.precision}, batch {manifest.plan.batch}, {repeats} "
        f"repetitions, {options['threads'] or 'default'} threads; a chain of new tokens at the end "
        "of a filled cache, logits of every node"
    )
    data = {
        "target": manifest.name,
        "precision": manifest.precision,
        "threads": options["threads"],
        "repeats": repeats,
        "conditions": facts,
        "results": [asdict(one) for one in results],
    }
    output.mkdir(parents=True, exist_ok=True)
    draw(results, output / "cost_curve.png")
    save(output, "cost_curve", data, report(results, title, footer(facts)))


if __name__ == "__main__":
    run(main, "cost_curve.py")
