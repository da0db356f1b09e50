"""Text in, text out, over a bundle: ``generate`` over ``stream_generate`` over token blocks.

The three layers of the Python API:

* :class:`~pspec.runtime.decode.Decoding` yields committed blocks of token ids and knows no text;
* :meth:`Generator.stream_generate` adds the tokenizer, stop strings and incremental text;
* :meth:`Generator.generate` collects the stream.
"""

from __future__ import annotations

import time
from collections import abc  # its Generator is not ours
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pspec.errors import RequestError
from pspec.runtime.bundle import Bundle, check_hashes, open_bundle
from pspec.runtime.calibration import find_curve
from pspec.runtime.decode import Block, Decoding, Stats, TreeSettings
from pspec.runtime.detokenizer import Detokenizer
from pspec.runtime.drafter import Drafter, ParallelDrafter
from pspec.runtime.engine import Engine
from pspec.runtime.engines import open_engine
from pspec.runtime.lookup import PromptLookup
from pspec.runtime.manifest import Role
from pspec.runtime.node_choice import AutoNodes, NodeBudget
from pspec.runtime.request import DraftMode, GenerationConfig, prompt_items, token_ids, whole
from pspec.runtime.round_cost import RoundCost
from pspec.runtime.stop import FinishReason, StopText
from pspec.runtime.target import Target
from pspec.runtime.text import Text

__all__ = ["Chunk", "DraftMode", "Generation", "GenerationConfig", "Generator", "Prompt"]

Prompt = str | Iterable[Mapping[str, Any]] | Iterable[int]
"""Text, chat messages, or token ids."""

_MOST_THREADS = 1024


@dataclass(frozen=True)
class Chunk:
    """What one committed block adds to an answer.

    Attributes:
        text: new text; may be empty while a character or a stop string is incomplete.
        token_ids: the block's tokens.
        accepted: how many of them were drafted.
        finish_reason: set on the last chunk.
    """

    text: str
    token_ids: list[int]
    accepted: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Generation:
    """A finished answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    engine: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The object that ``pspec generate --json`` prints."""
        stats, ms = self.stats, 1e3
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.token_ids),
            },
            "stats": {
                "engine": self.engine,
                "rounds": stats.rounds,
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "committed": stats.committed,
                "tau": stats.tau,
                "accepted_by_slot": stats.accepted_by_slot,
                "prefill_ms": stats.prefill_seconds * ms,
                "draft_ms": stats.draft_seconds * ms,
                "verify_ms": stats.verify_seconds * ms,
                "host_ms": stats.host_seconds * ms,
            },
        }


class Generator:
    """A bundle ready to answer: its text layer and its engines, opened once.

    Raises:
        RequestError: for a number of threads that is out of range.
        EngineError: when the engine cannot run here.
    """

    def __init__(self, bundle: Bundle, *, engine: str = "auto", threads: int | None = None) -> None:
        self._threads = None if threads is None else whole("threads", threads, 1, _MOST_THREADS)
        self.bundle = bundle
        self.text = Text.open(bundle.folder)
        self.engine = engine
        self._engines: dict[Role, Engine] = {}
        self._budgets: dict[str, AutoNodes] = {}
        self._target = Target(self._open("target"), bundle.manifest.plan)

    @classmethod
    def open(
        cls, folder: str | Path, *, engine: str = "auto", threads: int | None = None
    ) -> Generator:
        """Open a bundle folder, its hashes checked.

        Raises:
            BundleError: for a damaged bundle.
            EngineError: when the engine cannot run here.
            RequestError: for a number of threads that is out of range.
        """
        bundle = open_bundle(Path(folder))
        check_hashes(bundle)
        return cls(bundle, engine=engine, threads=threads)

    def encode(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of raw text, or of chat messages through the bundle's template."""
        if isinstance(prompt, str):
            return self.text.encode(prompt)
        return self.text.encode_chat(prompt)

    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
    ) -> Generation:
        """Answer a prompt: text, messages or token ids.

        Raises:
            RequestError: for settings or a prompt that cannot be served.
        """
        stream = self.stream_generate(prompt, config)
        try:
            while True:
                next(stream)
        except StopIteration as end:
            result: Generation = end.value
            return result

    def stream_generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        drafter: Drafter | None = None,
    ) -> abc.Generator[Chunk, None, Generation]:
        """Yield chunks as rounds commit them; the generator's return value is the result.

        Raises:
            RequestError: for settings or a prompt that cannot be served.
        """
        config = config or GenerationConfig()
        ids = self._prompt_ids(prompt)
        decoding = self.decode(config, drafter)
        return self.stream(ids, decoding, config)

    def decode(self, config: GenerationConfig, drafter: Drafter | None = None) -> Decoding:
        """The token-level state for a request; ``drafter`` replaces the configured one.

        Raises:
            RequestError: for settings that cannot be served.
        """
        if config.temperature != 0:
            raise RequestError(
                f"temperature {config.temperature:g} is not there yet: this release decodes "
                "greedily, use temperature 0"
            )
        manifest = self.bundle.manifest
        if manifest.plan.batch != 1:
            raise RequestError(
                f"the bundle was exported for batches of {manifest.plan.batch}: generation takes "
                "--batch 1 so far"
            )
        nodes = config.nodes if isinstance(config.nodes, int) else manifest.plan.nodes
        if not 1 <= nodes <= manifest.plan.nodes:
            raise RequestError(f"nodes {nodes} is not in 1..{manifest.plan.nodes}, the bundle's")
        drafter = drafter or self._drafter("off" if nodes == 1 else config.draft)
        budget = self._auto_nodes(drafter) if config.nodes == "auto" else NodeBudget()
        return Decoding(
            self._target,
            drafter,
            TreeSettings(nodes, budget=budget),
            self._eos(config),
            manifest.target.vocab_size,
        )

    def stream(
        self, ids: list[int], decoding: Decoding, config: GenerationConfig
    ) -> abc.Generator[Chunk, None, Generation]:
        """Text over a token-level state made by :meth:`decode`."""
        start = time.perf_counter()
        writer = _Writer(self.text, config.stop_strings)
        reason: FinishReason | None = None
        for block in decoding.run(ids, config.max_new_tokens):
            text, kept = writer.write(block)
            reason = block.finish_reason
            if kept is not None:
                decoding.retract(block, kept)
                reason = "stop"
            elif reason is not None:
                rest, stopped = writer.finish()
                text += rest
                reason = "stop" if stopped else reason
            tokens = block.tokens if kept is None else block.tokens[:kept]
            yield Chunk(text, tokens, min(block.accepted, len(tokens)), reason)
            if reason is not None:
                break
        return Generation(
            text=writer.text,
            token_ids=decoding.ids[len(ids) :],
            finish_reason=reason or "length",
            prompt_tokens=len(ids),
            stats=decoding.stats,
            engine=self._engines["target"].name,
            seconds=time.perf_counter() - start,
        )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        items = prompt if isinstance(prompt, str) else prompt_items(prompt)
        words = isinstance(items, str) or any(isinstance(item, Mapping) for item in items)
        ids = self.encode(items) if words else items
        return token_ids(ids, self.bundle.manifest.target.vocab_size)

    def _eos(self, config: GenerationConfig) -> frozenset[int]:
        """The bundle's ids or the request's, and stop strings that are whole special tokens."""
        target, chosen = self.bundle.manifest.target, config.eos_token_id
        if chosen is None:
            chosen = target.eos_token_ids
        else:
            token_ids(chosen, target.vocab_size, "eos_token_id")
        # Added tokens only: an ordinary token's name is not its text in a byte-level vocabulary.
        added = self.text.tokenizer.get_added_tokens_decoder().items()
        return frozenset(chosen) | {
            token for token, entry in added if entry.content in config.stop_strings
        }

    def _drafter(self, mode: DraftMode) -> Drafter | None:
        spec, plan = self.bundle.manifest.drafter, self.bundle.manifest.plan
        if mode == "off" or plan.accepted == 1:
            return None
        if mode == "lookup" or (mode == "auto" and spec is None):
            return PromptLookup(plan.accepted - 1)
        if spec is None:
            raise RequestError("the bundle has no drafter: use --draft lookup, off or auto")
        return ParallelDrafter(self._open("drafter"), spec, plan)

    def _auto_nodes(self, drafter: Drafter | None) -> NodeBudget:
        """The budget of a kind of drafts; what it learnt in earlier requests stays with it."""
        name = drafter.name if drafter is not None else "off"
        if name not in self._budgets:
            engine, nodes = self._target.engine, self.bundle.manifest.plan.nodes
            curve = find_curve(self.bundle, engine.name, self._threads)
            sizes = sorted({1, *(engine.fit(count) for count in range(1, nodes + 1))})
            self._budgets[name] = AutoNodes(sizes, RoundCost(curve, name, sizes))
        return self._budgets[name]

    def _open(self, role: Role) -> Engine:
        if role not in self._engines:
            self._engines[role] = open_engine(self.bundle, role, self.engine, self._threads)
        return self._engines[role]


class _Writer:
    """Turns blocks into text and finds where a stop string ends the answer."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(text.tokenizer)
        self._stops = StopText(stops)
        self.text = ""

    def write(self, block: Block) -> tuple[str, int | None]:
        """New text, and how many tokens count if a stop string was completed among them."""
        # An end-of-sequence token counts, but its text is never shown.
        shown = block.tokens[:-1] if block.finish_reason == "stop" else block.tokens
        new = ""
        for count, token in enumerate(shown, start=1):
            piece, stopped = self._stops.feed(
                self._detokenizer.push([token]), self._detokenizer.pending
            )
            new += piece
            if stopped:
                return self._show(new), count
        return self._show(new), None

    def finish(self) -> tuple[str, bool]:
        """What was held back, and whether it completed a stop string (a character cut in half)."""
        piece, stopped = self._stops.feed(self._detokenizer.finish())
        return self._show(piece if stopped else piece + self._stops.flush()), stopped

    def _show(self, new: str) -> str:
        self.text += new
        return new
