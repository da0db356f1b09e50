"""Every way of drafting gives plain decoding's tokens; every way of ending keeps its books."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bundles import TinyBundle, tiny_bundle
from pspec.errors import RequestError
from pspec.runtime.bundle import open_bundle
from pspec.runtime.decode import Decoding
from pspec.runtime.drafter import Drafter
from pspec.runtime.generate import Generation, GenerationConfig, Generator
from pspec.runtime.replay import Kind, ReplayDrafter

KINDS: tuple[Kind, ...] = ("oracle", "anti-oracle", "second-best")
MODES = ("off", "lookup", "bundle", *KINDS)
SLOTS = 4
NEW = 24


@pytest.fixture(scope="module", params=["llama_bundle", "qwen3_bundle"])
def bundle(request: pytest.FixtureRequest) -> TinyBundle:
    result: TinyBundle = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="module")
def generator(bundle: TinyBundle) -> Generator:
    return Generator(open_bundle(bundle.folder))


def make_prompt(length: int) -> list[int]:
    tokens = torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(length))
    return [int(token) for token in tokens]


def reference(bundle: TinyBundle, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers, end-of-sequence tokens ignored."""
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    result = bundle.hf_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options
    )
    tokens: list[int] = result[0, len(prompt) :].tolist()
    return tokens


def drafter_for(mode: str, ids: list[int], vocab_size: int) -> Drafter | None:
    return ReplayDrafter(mode, ids, SLOTS, vocab_size) if mode in KINDS else None


def run(
    generator: Generator, mode: str, prompt: list[int], answer: list[int], **settings: Any
) -> tuple[Generation, Decoding]:
    """Answer a prompt in one mode; ``answer`` is what replay drafters replay."""
    vocab_size = generator.bundle.manifest.target.vocab_size
    settings.setdefault("eos_token_id", ())
    draft = "off" if mode in KINDS else mode
    config = GenerationConfig(draft=draft, **settings)  # type: ignore[arg-type]
    decoding = generator.decode(config, drafter_for(mode, prompt + answer, vocab_size))
    stream = generator.stream(prompt, decoding, config)
    texts = []
    try:
        while True:
            texts.append(next(stream).text)
    except StopIteration as end:
        result: Generation = end.value
    assert "".join(texts) == result.text
    return result, decoding


def check_books(result: Generation, decoding: Decoding, prompt: list[int]) -> None:
    """Usage, cache and statistics describe the same tokens."""
    stats, count = decoding.stats, len(result.token_ids)
    usage = result.to_json()["usage"]
    assert usage == {"prompt_tokens": len(prompt), "completion_tokens": count}
    assert stats.committed == max(count - 1, 0)
    assert 0 <= stats.accepted <= stats.committed
    assert stats.accepted == sum(stats.accepted_by_slot)
    if count:
        assert int(decoding.target.engine.lengths[0]) == len(prompt) + count - 1


@pytest.mark.parametrize("length", [1, 2, 3, 20, 70])
def test_every_mode_says_what_transformers_says(
    bundle: TinyBundle, generator: Generator, length: int
) -> None:
    prompt = make_prompt(length)
    answer = reference(bundle, prompt, NEW)
    for mode in MODES:
        result, decoding = run(generator, mode, prompt, answer, max_new_tokens=NEW)
        assert result.token_ids == answer, mode
        assert result.finish_reason == "length"
        check_books(result, decoding, prompt)


@pytest.mark.parametrize("mode", MODES)
def test_each_position_declared_the_end(generator: Generator, mode: str) -> None:
    prompt = make_prompt(6)
    answer, _ = run(generator, "off", prompt, [], max_new_tokens=NEW)
    for position, token in enumerate(answer.token_ids):
        first = answer.token_ids.index(token)
        result, decoding = run(
            generator, mode, prompt, answer.token_ids, max_new_tokens=NEW, eos_token_id=(token,)
        )
        assert result.token_ids == answer.token_ids[: first + 1], position
        assert result.finish_reason == "stop"
        check_books(result, decoding, prompt)


@pytest.mark.parametrize("mode", MODES)
def test_budgets_are_exact(generator: Generator, mode: str) -> None:
    prompt = make_prompt(5)
    answer, _ = run(generator, "off", prompt, [], max_new_tokens=NEW)
    for budget in range(2 * SLOTS + 4):
        result, decoding = run(generator, mode, prompt, answer.token_ids, max_new_tokens=budget)
        assert result.token_ids == answer.token_ids[:budget]
        assert result.finish_reason == "length"
        check_books(result, decoding, prompt)


def test_an_end_on_the_budget_is_an_end(generator: Generator) -> None:
    prompt = make_prompt(5)
    answer, _ = run(generator, "off", prompt, [], max_new_tokens=NEW)
    last = answer.token_ids[7]
    budget = answer.token_ids.index(last) + 1
    for mode in MODES:
        result, _ = run(
            generator,
            mode,
            prompt,
            answer.token_ids,
            max_new_tokens=budget,
            eos_token_id=(last,),
        )
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("left", [1, 2, 3, 5, 9])
def test_the_context_ends(bundle: TinyBundle, generator: Generator, left: int) -> None:
    context = generator.bundle.manifest.plan.max_context
    prompt = make_prompt(context - left)
    answer = reference(bundle, prompt, left)
    for mode in MODES:
        result, decoding = run(generator, mode, prompt, answer, max_new_tokens=500)
        assert result.token_ids == answer
        assert result.finish_reason == "length"
        check_books(result, decoding, prompt)


def stop_cases(text: str) -> Iterator[str]:
    """Strings that end the text at each of its offsets, within tokens and across them."""
    for start in range(len(text)):
        for length in (1, 2, 5):
            if start + length <= len(text):
                yield text[start : start + length]


@pytest.mark.parametrize("mode", ["off", "lookup", "bundle", "oracle", "second-best"])
def test_stop_strings_at_every_offset(generator: Generator, mode: str) -> None:
    prompt = make_prompt(4)
    answer, _ = run(generator, "off", prompt, [], max_new_tokens=NEW)
    assert len(answer.text) > 10
    for stop in dict.fromkeys(stop_cases(answer.text)):
        result, decoding = run(
            generator, mode, prompt, answer.token_ids, max_new_tokens=NEW, stop_strings=(stop,)
        )
        plain, _ = run(generator, "off", prompt, [], max_new_tokens=NEW, stop_strings=(stop,))
        assert result.text == answer.text[: answer.text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.token_ids == plain.token_ids
        shown = generator.text.decode(result.token_ids)
        assert stop in shown
        # A broken character is only known to be one later on: such a stop is found at its end.
        if "\ufffd" not in stop:
            assert stop not in generator.text.decode(result.token_ids[:-1])
        check_books(result, decoding, prompt)


def test_a_prompt_as_long_as_the_context_is_refused(generator: Generator) -> None:
    context = generator.bundle.manifest.plan.max_context
    with pytest.raises(RequestError, match=f"has {context} tokens"):
        run(generator, "off", make_prompt(context), [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": 0.5}, "temperature 0.5 is not there yet"),
        ({"nodes": 0}, "nodes is 0, expected a whole number of 1 or more"),
        ({"nodes": 9}, "nodes 9 is not in 1..8"),
    ],
)
def test_bad_settings_are_refused(
    generator: Generator, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        run(generator, "off", make_prompt(3), [], **settings)


def test_an_end_token_outside_the_vocabulary_is_refused(generator: Generator) -> None:
    vocab = generator.bundle.manifest.target.vocab_size
    generator.decode(GenerationConfig(eos_token_id=(vocab - 1,)))
    with pytest.raises(RequestError, match=rf"eos_token_id {vocab} is not in 0\.\."):
        generator.decode(GenerationConfig(eos_token_id=(vocab,)))


@pytest.mark.parametrize("threads", [0, -1, 1025, True, "2", 1.5])
def test_threads_out_of_range_are_refused(bundle: TinyBundle, threads: Any) -> None:
    with pytest.raises(RequestError, match=r"threads is .* in 1\.\.1024"):
        Generator.open(bundle.folder, threads=threads)


HELLO = {"role": "user", "content": "one two"}


def test_prompts_come_in_many_forms(generator: Generator) -> None:
    config = GenerationConfig(max_new_tokens=4, eos_token_id=())

    def say(prompt: Any) -> list[int]:
        return generator.generate(prompt, config).token_ids

    ids = make_prompt(5)
    forms: list[Any] = [tuple(ids), np.array(ids), (i for i in ids), torch.tensor(ids)]
    assert [say(form) for form in forms] == [say(ids)] * len(forms)
    chats: list[Any] = [(HELLO,), (message for message in [HELLO])]
    assert [say(chat) for chat in chats] == [say([HELLO])] * len(chats)


@pytest.mark.parametrize(
    "prompt", [b"one two", None, 5, HELLO, [5, HELLO], [HELLO, 5], ["one"], [True], [5, 6.0], [-1]]
)
def test_what_is_no_prompt_is_refused_at_once(generator: Generator, prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"the prompt|token id"):
        generator.stream_generate(prompt)
    with pytest.raises(RequestError, match="the prompt is empty"):
        generator.generate([])


@pytest.mark.parametrize("prompt", [[-1], [5, 10**6], [True], [5.0], "56", b"56", None, np.eye(2)])
def test_decoding_takes_token_ids_only(generator: Generator, prompt: Any) -> None:
    decoding = generator.decode(GenerationConfig())
    with pytest.raises(RequestError, match="token id"):
        next(decoding.run(prompt, 4))


@pytest.mark.parametrize("mode", MODES)
def test_each_run_of_a_decoding_begins_anew(generator: Generator, mode: str) -> None:
    prompt = make_prompt(5)
    answer, _ = run(generator, "off", prompt, [], max_new_tokens=NEW)
    first, decoding = run(generator, mode, prompt, answer.token_ids, max_new_tokens=NEW)
    rounds, accepted = first.stats.rounds, first.stats.accepted_by_slot.copy()

    list(decoding.run(np.array(prompt), NEW))

    assert decoding.ids == prompt + answer.token_ids
    assert (first.stats.rounds, first.stats.accepted_by_slot) == (rounds, accepted)
    assert (decoding.stats.rounds, decoding.stats.accepted_by_slot) == (rounds, accepted)
    assert decoding.stats.committed == NEW - 1
    assert not list(decoding.run(prompt, 0))
    assert (decoding.ids, decoding.stats.rounds) == ([], 0)


def test_plain_decoding_has_a_tau_of_exactly_one(generator: Generator) -> None:
    result, _ = run(generator, "off", make_prompt(3), [], max_new_tokens=NEW)
    assert result.stats.tau == 1.0
    assert result.stats.rounds == NEW - 1


def test_a_second_stream_ends_the_first_one_loudly(generator: Generator) -> None:
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=())
    first = generator.stream_generate(make_prompt(3), config)
    next(first)
    second = generator.generate(make_prompt(4), config)

    with pytest.raises(RequestError, match="another generation took the engine over"):
        list(first)
    assert second.token_ids == generator.generate(make_prompt(4), config).token_ids


def test_an_abandoned_stream_leaves_nothing_behind(generator: Generator) -> None:
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=())
    wanted = generator.generate(make_prompt(4), config).token_ids
    for taken in range(4):
        stream = generator.stream_generate(make_prompt(9), config)
        for _ in range(taken):
            next(stream)
        stream.close()
        assert generator.generate(make_prompt(4), config).token_ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_", [{"max_context": 2}, {"max_context": 3}, {"nodes": 1}, {"nodes": 3}, {"nodes": 200}]
)
def test_odd_shapes_decode_alike(tmp_path: Path, request_: dict[str, Any]) -> None:
    # Contexts shorter than a chunk, trees of one node, trees larger than a chunk.
    bundle = tiny_bundle(tmp_path, "llama", **request_)
    generator = Generator(open_bundle(bundle.folder))
    context = generator.bundle.manifest.plan.max_context
    for length in (1, 2, 5, 70):
        if length >= context:
            continue
        prompt = make_prompt(length)
        wanted = reference(bundle, prompt, min(20, context - length))
        for mode in ("off", "lookup", "bundle"):
            result, _ = run(generator, mode, prompt, [], max_new_tokens=20)
            assert result.token_ids == wanted, (mode, length)
