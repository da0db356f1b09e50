"""What a runner and the driver say to each other: a line of JSON each way, over pipes.

The driver sends one ``start``, then jobs; the runner answers each line with one. Runners are run by
the interpreters of their peers, so this module needs the standard library only.

* ``{"model", "mode", "threads", "context", "drafted", "ngram"}`` starts a runner; it answers with
  ``{"versions", "settings"}`` once the model is loaded.
* ``{"ids", "max_new_tokens", "mode"}`` is a job; the answer is an :class:`Answer`'s fields.
* ``{"error"}`` takes the place of any answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, TextIO

MODES = ("plain", "lookup")


@dataclass(frozen=True)
class Start:
    """How a runner is to be set up.

    Attributes:
        model: path of what the peer loads.
        mode: one of :data:`MODES`.
        threads: threads to compute with.
        context: most tokens of a prompt and its answer.
        drafted: most tokens drafted at once, for ``lookup``.
        ngram: length of the n-grams that are looked up.
    """

    model: str
    mode: str
    threads: int
    context: int
    drafted: int
    ngram: int


@dataclass(frozen=True)
class Answer:
    """What one job gave.

    Attributes:
        seconds_prefill: until the first token was known.
        seconds_decode: from there to the last.
        tokens: number of ids, the first included.
        ids: what was generated.
        rounds: target calls that gave all ids but the first; None where the peer does not tell.
    """

    seconds_prefill: float
    seconds_decode: float
    tokens: int
    ids: list[int]
    rounds: int | None


Generate = Callable[[list[int], int], Answer]
Loaded = tuple[Generate, dict[str, Any]]


def serve(load: Callable[[Start], Loaded], packages: tuple[str, ...]) -> None:
    """Run a peer until the driver closes the pipe.

    Args:
        load: loads the model; returns what generates, and settings worth reporting.
        packages: distributions whose versions are reported.
    """
    out = _own_stdout()
    try:
        start = Start(**json.loads(sys.stdin.readline()))
        generate, settings = load(start)
        versions = {name: version(name) for name in packages}
        _say(out, {"versions": versions, "settings": settings})
        for line in sys.stdin:
            job = json.loads(line)
            if job["mode"] != start.mode:
                raise ValueError(f"started for {start.mode}, asked for {job['mode']}")
            _say(out, asdict(generate(job["ids"], job["max_new_tokens"])))
    except Exception as error:
        _say(out, {"error": f"{type(error).__name__}: {error}"})
        raise


def _own_stdout() -> TextIO:
    """The pipe to the driver; whatever a library prints goes to stderr from here on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
