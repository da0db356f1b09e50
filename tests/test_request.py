"""What a request may hold: everything else is one clear line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pspec.errors import RequestError
from pspec.runtime.request import GenerationConfig, prompt_items, token_ids, whole

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "frob"}, "draft is 'frob', expected one of auto, bundle, lookup, off"),
        ({"draft": None}, "draft is None"),
        ({"draft": ["off"]}, "draft is ['off']"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, expected a whole number of 0 or more"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 3.0}, "max_new_tokens is 3.0"),
        ({"max_new_tokens": "3"}, "max_new_tokens is '3'"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"nodes": 0}, "nodes is 0, expected a whole number of 1 or more"),
        ({"nodes": True}, "nodes is True"),
        ({"nodes": 2.5}, "nodes is 2.5"),
        ({"temperature": float("nan")}, "temperature nan is no finite number"),
        ({"temperature": float("inf")}, "temperature inf is no finite number"),
        ({"temperature": -0.1}, "temperature -0.1 is no finite number of 0 or more"),
        ({"temperature": "0"}, "temperature '0'"),
        ({"temperature": None}, "temperature None"),
        ({"temperature": False}, "temperature False"),
        ({"stop_strings": ""}, "stop string '' must be a non-empty string"),
        ({"stop_strings": ("a", "")}, "stop string ''"),
        ({"stop_strings": ("a", 3)}, "stop string 3"),
        ({"stop_strings": None}, "stop_strings cannot be None: expected strings"),
        ({"stop_strings": b"ab"}, "stop_strings cannot be bytes"),
        ({"stop_strings": 3}, "stop_strings cannot be int"),
        ({"eos_token_id": -1}, "eos_token_id is -1, expected a whole number of 0 or more"),
        ({"eos_token_id": True}, "eos_token_id cannot be bool: expected one id or several"),
        ({"eos_token_id": "2"}, "eos_token_id cannot be str"),
        ({"eos_token_id": (2, "3")}, "eos_token_id is '3'"),
        ({"eos_token_id": (2, None)}, "eos_token_id is None"),
    ],
)
def test_a_setting_no_bundle_could_serve(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        GenerationConfig(**settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError):
        replace(GenerationConfig(), **settings)


def test_settings_take_one_form() -> None:
    given: dict[str, Any] = {"stop_strings": "stop", "eos_token_id": 2}
    config = GenerationConfig(**given, max_new_tokens=np.int64(3), nodes=np.int32(4))
    assert (config.stop_strings, config.eos_token_id) == (("stop",), (2,))
    assert (type(config.max_new_tokens), type(config.nodes)) == (int, int)
    given = {"stop_strings": ["a", "b"], "eos_token_id": np.array([1, 2]), "temperature": 0}
    config = GenerationConfig(**given)
    assert (config.stop_strings, config.eos_token_id) == (("a", "b"), (1, 2))
    assert type(config.temperature) is float
    assert GenerationConfig(eos_token_id=()).eos_token_id == ()
    assert hash(config) == hash(replace(config))


def numbers() -> Iterator[int]:
    yield from (1, 2, 3)


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int32), numbers()])
def test_token_ids_become_plain_ints(ids: Any) -> None:
    found = token_ids(ids, 4)
    assert found == [1, 2, 3]
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 4], "token id 4 is not in 0..3, the vocabulary"),
        ([-1], "token id -1 is not in 0..3"),
        ([1, 2.0], "token id 2.0 is no whole number"),
        ([True], "token id True is no whole number"),
        (np.array([True]), "is no whole number"),
        (np.array([[1, 2]]), "token id array([1, 2]) is no whole number"),
        (np.array([0.0]), "is no whole number"),
        (np.array(1), "token ids cannot be ndarray"),
        ("12", "token ids cannot be str"),
        (b"\1\2", "token ids cannot be bytes"),
        ({1: 2}, "token ids cannot be dict"),
        (None, "token ids cannot be None"),
        (3, "token ids cannot be int"),
    ],
)
def test_what_is_no_token_id(ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        token_ids(ids, 4)


def test_prompts_are_read_once() -> None:
    assert prompt_items(numbers()) == [1, 2, 3]
    assert prompt_items(message for message in (HELLO, HELLO)) == [HELLO, HELLO]
    assert prompt_items([np.int64(1), 2]) == [1, 2]
    assert prompt_items([]) == []


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (b"hello", "cannot be bytes"),
        (bytearray(b"hello"), "cannot be bytearray"),
        (None, "cannot be None"),
        (3, "cannot be int"),
        (HELLO, "cannot be dict"),
        ([1, HELLO], "holds dict, int"),
        ([1, "two"], "holds int, str"),
        (["hello"], "holds str"),
        ([True, False], "holds bool"),
        ([1, None], "holds None, int"),
        ([1.0], "holds float"),
        ([[1, 2]], "holds list"),
    ],
)
def test_what_is_no_prompt(prompt: Any, kind: str) -> None:
    with pytest.raises(RequestError, match=f"the prompt {kind}: expected text, a list of token"):
        prompt_items(prompt)


def test_whole_numbers_have_a_range() -> None:
    assert whole("threads", 1024, 1, 1024) == 1024
    with pytest.raises(
        RequestError, match=r"threads is 1025, expected a whole number in 1\.\.1024"
    ):
        whole("threads", 1025, 1, 1024)
