"""What a request may hold, checked where it comes in: settings, prompts, token ids."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np

from pspec.errors import RequestError

DraftMode = Literal["auto", "bundle", "lookup", "off"]


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of one request, under Hugging Face's names.

    Attributes:
        max_new_tokens: budget; the context's end comes first where it is nearer.
        temperature: 0 is greedy, the only one so far.
        stop_strings: text that ends the answer; it is not shown. One string stands for itself.
        eos_token_id: ids that end the answer instead of the bundle's own; empty means none. One
            id stands for itself.
        draft: the bundle's drafter, prompt lookup, none, or the best the bundle has.
        nodes: tree nodes, node 0 included; None takes the bundle's number, ``auto`` what pays on a
            device that was calibrated, round by round.

    Raises:
        RequestError: for a value no bundle could serve.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    stop_strings: tuple[str, ...] = ()
    eos_token_id: tuple[int, ...] | None = None
    draft: DraftMode = "auto"
    nodes: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        modes = get_args(DraftMode)
        if self.draft not in modes:
            raise RequestError(f"draft is {shown(self.draft)}, expected one of {', '.join(modes)}")
        self._set("max_new_tokens", whole("max_new_tokens", self.max_new_tokens, 0))
        if self.nodes is not None and not (isinstance(self.nodes, str) and self.nodes == "auto"):
            self._set("nodes", whole("nodes", self.nodes, 1))
        self._set("temperature", _temperature(self.temperature))
        self._set("stop_strings", _stop_strings(self.stop_strings))
        if self.eos_token_id is not None:
            self._set("eos_token_id", _end_tokens(self.eos_token_id))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number in range, as a Python int.

    Raises:
        RequestError: naming the setting and its range.
    """
    number = _as_int(value)
    if number is None or number < least or (most is not None and number > most):
        span = f"of {least} or more" if most is None else f"in {least}..{most}"
        text = shown(value) if number is None else number
        raise RequestError(f"{name} is {text}, expected a whole number {span}")
    return number


def token_ids(values: object, vocab_size: int, what: str = "token id") -> list[int]:
    """Token ids as Python ints, from any iterable of whole numbers.

    Raises:
        RequestError: for anything else, and for ids outside the vocabulary.
    """
    ids = []
    for value in _listed(values, f"{what}s", "expected a list of whole numbers"):
        token = _as_int(value)
        if token is None:
            raise RequestError(f"{what} {shown(value)} is no whole number")
        if not 0 <= token < vocab_size:
            raise RequestError(f"{what} {token} is not in 0..{vocab_size - 1}, the vocabulary")
        ids.append(token)
    return ids


def prompt_items(prompt: object) -> list[Any]:
    """The items of a prompt that is no text: all of them whole numbers, or all of them messages.

    Raises:
        RequestError: for anything else.
    """
    items = _listed(prompt, "the prompt", _PROMPT)
    messages = sum(isinstance(item, Mapping) for item in items)
    numbers = sum(_as_int(item) is not None for item in items)
    if len(items) not in (messages, numbers):
        kinds = ", ".join(sorted({_kind(item) for item in items}))
        raise RequestError(f"the prompt holds {kinds}: {_PROMPT}")
    return items


def shown(value: object) -> str:
    """A value as an error line can hold it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


_PROMPT = (
    "expected text, a list of token ids, or a list of messages such as "
    "{'role': 'user', 'content': 'Hello'}"
)


def _as_int(value: object) -> int | None:
    """Numbers of numpy and torch count, booleans do not."""
    if isinstance(value, bool | np.bool_):  # which older numpy takes for an index
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _listed(values: object, what: str, expected: str) -> list[Any]:
    """The items of a collection; a string's characters, a dict's keys and bytes are none."""
    closed = isinstance(values, (str, bytes, bytearray, memoryview, Mapping))
    try:
        items = None if closed else iter(values)  # type: ignore[call-overload]
    except TypeError:
        items = None
    if items is None:
        raise RequestError(f"{what} cannot be {_kind(values)}: {expected}")
    return list(items)


def _temperature(value: object) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        text = value if number else shown(value)
        raise RequestError(f"temperature {text} is no finite number of 0 or more")
    return float(value)  # type: ignore[arg-type]


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = (
        [value] if isinstance(value, str) else _listed(value, "stop_strings", "expected strings")
    )
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop string {shown(stop)} must be a non-empty string")
    return tuple(stops)


def _end_tokens(value: object) -> tuple[int, ...]:
    """Ids that may end an answer; whether the vocabulary has them, a bundle will say."""
    one = _as_int(value)
    many = (
        [one] if one is not None else _listed(value, "eos_token_id", "expected one id or several")
    )
    return tuple(whole("eos_token_id", item, 0) for item in many)
