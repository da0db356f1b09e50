"""How far is a quantised target from its fp32 original, on text that the target wrote?

Finished conversations (JSONL, an object with ``messages`` a line) are read by every bundle in the
same calls, and next-token distributions compared at every position. The first bundle is the
reference. Engine ``standard`` has quantised weights only, ``onnxruntime`` also rounds the inputs
of products.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np
from _measure import conditions, footer, save, table
from numpy.typing import NDArray

from pspec.cli_run import run
from pspec.errors import ConfigError
from pspec.runtime.bundle import Bundle, open_bundle
from pspec.runtime.engine import Engine
from pspec.runtime.engines import open_engine
from pspec.runtime.text import Text

_CALL = 64
"""Tokens of a call."""


@dataclass
class Agreement:
    """One bundle in one engine against the reference."""

    name: str
    bytes: int
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)


def conversations(path: Path, text: Text, longest: int) -> Iterator[list[int]]:
    """Token ids of each conversation that fits, in the file's order."""
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        ids = text.encode_chat(messages, add_generation_prompt=False)
        if len(ids) <= longest:
            yield ids


def log_probabilities(engine: Engine, ids: Sequence[int]) -> Iterator[NDArray[np.float64]]:
    """``[n, V]`` of the positions of ``ids``, call by call."""
    engine.truncate(0, 0)
    for start in range(0, len(ids), _CALL):
        part = ids[start : start + _CALL]
        count = len(part)
        binding = engine.bind(count, count)
        inputs = binding.inputs
        inputs["token_ids"][0] = part
        inputs["position_ids"][0] = start + np.arange(count)
        inputs["tree_mask"][0] = np.tri(count, dtype=np.bool_)
        inputs["logit_rows"][0] = np.arange(count)
        engine.run(binding, count)
        engine.commit(0, range(count))
        logits = binding.outputs["logits"][0].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def compare(
    reference: Engine, others: Sequence[tuple[Agreement, Engine]], ids: Sequence[int]
) -> None:
    """Add the positions of one conversation."""
    streams = [log_probabilities(engine, ids) for _, engine in others]
    for calls in zip(log_probabilities(reference, ids), *streams, strict=True):
        want = calls[0]
        chance = np.exp(want)
        for (agreement, _), got in zip(others, calls[1:], strict=True):
            agreement.kl += (chance * (want - got)).sum(axis=-1).tolist()
            agreement.same += (want.argmax(axis=-1) == got.argmax(axis=-1)).tolist()


def weight_bytes(bundle: Bundle) -> int:
    """Bytes of the bundle's distinct tensors."""
    return int(bundle.manifest.provenance["weight_bytes"])


@click.command(help=__doc__)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--conversations", "path", required=True, type=click.Path(path_type=Path))
@click.option("--tokens", default=20_000, show_default=True, help="Positions to compare.")
@click.option("--engine", "engines", multiple=True, default=("onnxruntime", "standard"))
@click.option("--threads", type=click.IntRange(1), help="One a core if unset.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("bench-precision"), show_default=True
)
def main(
    bundles: tuple[Path, ...],
    path: Path,
    tokens: int,
    engines: tuple[str, ...],
    threads: int | None,
    output: Path,
) -> None:
    """Compare and save; see the module."""
    if len(bundles) < 2:
        raise ConfigError("name the fp32 bundle, then at least one other")
    facts = conditions()
    first, *rest = [open_bundle(one) for one in bundles]
    reference = open_engine(first, "target", "standard", threads)
    others = [
        (
            Agreement(f"{one.manifest.precision} {name}", weight_bytes(one)),
            open_engine(one, "target", name, threads),
        )
        for one in rest
        for name in engines
    ]
    done = 0
    longest = first.manifest.plan.max_context
    for ids in conversations(path, Text.open(first.folder), longest):
        compare(reference, others, ids)
        done += len(ids)
        print(f"\r{done} of {tokens} tokens", end="", flush=True)
        if done >= tokens:
            break
    print()
    whole = weight_bytes(first)
    rows: list[list[object]] = [["fp32 standard", f"{whole / 1e6:.0f}", "0", "100.0%", done]]
    rows += [
        [
            one.name,
            f"{one.bytes / 1e6:.0f}",
            f"{np.mean(one.kl):.4f}",
            f"{np.mean(one.same):.1%}",
            len(one.same),
        ]
        for one, _ in others
    ]
    header = ("precision and engine", "weights MB", "KL nats", "top-1 equal", "tokens")
    data = {
        "conditions": facts,
        "results": [
            {**asdict(one), "kl": float(np.mean(one.kl)), "same": float(np.mean(one.same))}
            for one, _ in others
        ],
    }
    output.mkdir(parents=True, exist_ok=True)
    parts = ["# Agreement with fp32", table(header, rows), footer(facts)]
    save(output, "precision", data, "\n\n".join(parts))


if __name__ == "__main__":
    run(main, "precision.py")
