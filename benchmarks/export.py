"""What does an export cost? Wall time and peak memory, stage by stage, in a process of its own.

By default SmolLM2 with an untrained drafter of one layer. ``--random-llama-1b`` exports a random
bf16 checkpoint of Llama 3.2 1B's shape instead, without a drafter, and fails where the peak is more
than 1.5 times the fp32 weights or an ONNX file reaches 2 GB. Peak memory is resident memory, with
what the process maps of files; anonymous memory, sampled beside it, is what cannot be given back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from _measure import Spread, conditions, footer, save, spread, table

import pspec
from pspec.cli_run import run
from pspec.errors import PspecError
from pspec.runtime.bundle import open_bundle

LARGEST_RATIO = 1.5
LARGEST_ONNX = 2 * 10**9
_SAMPLE = 0.02
"""Seconds between two looks at a child's memory."""


@dataclass(frozen=True)
class Stage:
    """One stage; its peak is the process's resident memory during it, in bytes."""

    name: str
    seconds: float
    peak: int


@dataclass(frozen=True)
class Export:
    """One export in a child."""

    wall: float
    stages: tuple[Stage, ...]
    anonymous: int
    modules: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Most resident memory of any stage."""
        return max(stage.peak for stage in self.stages)


@dataclass(frozen=True)
class Files:
    """Bytes of a bundle."""

    largest_onnx: int
    onnx: int
    graphs: int
    weights_data: int
    weights: int


def run_child(kind: str, given: object, folder: Path) -> tuple[dict[str, Any], float, int]:
    """Run the measured half; its report, the wall time, and the most anonymous memory seen."""
    source, destination = folder / "given.json", folder / "report.json"
    source.write_text(json.dumps(given), encoding="utf-8")
    script = Path(__file__).with_name("_export_child.py")
    command = [sys.executable, str(script), kind, str(source), str(destination)]
    # The code that is measured is the code that measures, installed or not.
    paths = [str(Path(pspec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    start = time.perf_counter()
    with subprocess.Popen(command, env=environment) as child:
        most = 0
        while child.poll() is None:
            most = max(most, anonymous_bytes(child.pid))
            time.sleep(_SAMPLE)
    wall = time.perf_counter() - start
    if child.returncode != 0:
        raise PspecError(f"the {kind} process ended with status {child.returncode}, see above")
    report: dict[str, Any] = json.loads(destination.read_bytes())
    return report, wall, most


def anonymous_bytes(pid: int) -> int:
    """``RssAnon`` of a process; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def measure(request: dict[str, Any], work: Path) -> Export:
    """Export once."""
    report, wall, anonymous = run_child("export", request, work)
    stages = tuple(Stage(one["stage"], one["seconds"], one["peak"]) for one in report["stages"])
    return Export(wall, stages, anonymous, tuple(report["modules"]))


def sizes(bundle: Path) -> Files:
    """What a bundle holds on disk."""
    opened = open_bundle(bundle)
    graphs = [path.stat().st_size for path in opened.graphs.glob("*.onnx")]
    return Files(
        largest_onnx=max(graphs),
        onnx=sum(graphs),
        graphs=len(graphs),
        weights_data=(opened.graphs / "weights.data").stat().st_size,
        weights=int(opened.manifest.provenance["weight_bytes"]),
    )


def initial_drafter_folder(target: str, folder: Path) -> Path:
    """An untrained drafter of one layer for ``target``."""
    from pspec.models.checkpoint import load_target
    from pspec.models.drafter_file import write_drafter
    from pspec.models.initial import initial_config, initial_drafter

    decoder = load_target(target).decoder
    write_drafter(initial_drafter(decoder, initial_config(decoder)), folder)
    return folder


@dataclass(frozen=True)
class Result:
    """All exports of one run."""

    name: str
    exports: tuple[Export, ...]
    imports: int
    files: Files

    @property
    def peak(self) -> int:
        """Most memory of any export."""
        return max(one.peak for one in self.exports)

    @property
    def ratio(self) -> float:
        """That peak over the weights in fp32."""
        return self.peak / self.files.weights

    def passed(self) -> bool:
        """Whether a large target would still fit where it must."""
        return self.ratio <= LARGEST_RATIO and self.files.largest_onnx < LARGEST_ONNX

    def walls(self) -> Spread:
        """Wall times."""
        return spread(one.wall for one in self.exports)


def report(result: Result, foot: str) -> str:
    """The result for people."""
    first, files = result.exports[0], result.files
    facts = [
        ("wall time, s", result.walls().text(1)),
        ("peak memory, MB", megabytes(result.peak)),
        ("of it anonymous (sampled), MB", megabytes(max(one.anonymous for one in result.exports))),
        ("imports alone, MB", megabytes(result.imports)),
        ("weights in fp32, MB", megabytes(files.weights)),
        ("peak over weights", f"{result.ratio:.2f}"),
        ("without the imports", f"{(result.peak - result.imports) / files.weights:.2f}"),
        ("weights.data, MB", megabytes(files.weights_data)),
        (f"largest of {files.graphs} ONNX files, MB", megabytes(files.largest_onnx)),
        ("all ONNX files, MB", megabytes(files.onnx)),
    ]
    stages = []
    for number, stage in enumerate(first.stages):
        seconds = spread(one.stages[number].seconds for one in result.exports)
        peak = max(one.stages[number].peak for one in result.exports)
        stages.append((stage.name, seconds.text(), megabytes(peak)))
    parts = [
        f"# Export of {result.name}",
        table(("figure", "value"), facts),
        table(("stage", "seconds", "peak MB"), stages),
        f"Median [quartiles] of {len(result.exports)} exports; memory is the most of any.",
    ]
    return "\n\n".join([*parts, foot])


def megabytes(count: int) -> str:
    """Bytes for a table."""
    return f"{count / 1e6:.1f}"


def run_exports(request: dict[str, Any], work: Path, repeats: int, name: str) -> Result:
    """Export ``repeats`` times, and measure the imports once."""
    exports = []
    for number in range(repeats):
        print(f"export {number + 1} of {repeats}", flush=True)
        exports.append(measure(request | {"force": number > 0}, work))
    alone, _, _ = run_child("imports", list(exports[0].modules), work)
    return Result(name, tuple(exports), alone["rss"], sizes(Path(request["output"])))


def random_checkpoint(folder: Path, layers: int) -> str:
    """A random checkpoint in ``folder``; returns what to call it."""
    from _random_llama import LlamaSize, write_random_llama

    print("writing a random checkpoint", flush=True)
    parameters = write_random_llama(folder, LlamaSize(num_hidden_layers=layers))
    return f"a random Llama, {parameters / 1e9:.2f} G parameters in bf16"


@click.command(help=__doc__)
@click.option("--target", default="smollm2", show_default=True, help="As pspec-export takes it.")
@click.option("--drafter", type=click.Path(path_type=Path), help="An untrained one if unset.")
@click.option("--random-llama-1b", "random_llama", is_flag=True, help="Instead of --target.")
@click.option("--layers", type=click.IntRange(1), default=16, show_default=True, help="Of it.")
@click.option("--max-context", default=1024, show_default=True)
@click.option("--nodes", default=8, show_default=True)
@click.option("--repeats", type=click.IntRange(1), help="3, or 1 for the random Llama.")
@click.option("--work", type=click.Path(path_type=Path), help="Parent of the temporary folder.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("bench-export"), show_default=True
)
def main(
    target: str,
    drafter: Path | None,
    random_llama: bool,
    layers: int,
    repeats: int | None,
    work: Path | None,
    output: Path,
    **plan: int,
) -> None:
    """Measure and save; see the module."""
    from _reference import target_path

    facts = conditions()
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pspec-bench-", dir=work) as place:
        folder = Path(place)
        request: dict[str, Any] = {**plan, "output": str(folder / "bundle")}
        if random_llama:
            name = random_checkpoint(folder / "target", layers)
            request["target"] = str(folder / "target")
        else:
            name = Path(target).name
            request["target"] = target_path(target)
            made = drafter or initial_drafter_folder(request["target"], folder / "drafter")
            request["drafter"] = str(made)
        result = run_exports(request, folder, repeats or (1 if random_llama else 3), name)
    data = {
        "name": name,
        **plan,
        "conditions": facts,
        "wall": asdict(result.walls()),
        "peak": result.peak,
        "imports": result.imports,
        "peak_over_weights": result.ratio,
        "files": asdict(result.files),
        "exports": [_export_record(one) for one in result.exports],
    }
    label = "export_random_llama" if random_llama else "export"
    save(output, label, data, report(result, footer(facts)))
    if random_llama and not result.passed():
        print(f"FAILED: more than {LARGEST_RATIO} times the weights, or an ONNX file of 2 GB")
        sys.exit(1)


def _export_record(one: Export) -> dict[str, Any]:
    stages: Sequence[dict[str, Any]] = [asdict(stage) for stage in one.stages]
    return {"wall": one.wall, "peak": one.peak, "anonymous": one.anonymous, "stages": stages}


if __name__ == "__main__":
    run(main, "export.py")
