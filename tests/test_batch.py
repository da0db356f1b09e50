"""Rows decoded together say what each says alone, whoever sits beside, before or after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundles import TinyBundle, tiny_bundle
from pspec.errors import EngineError, RequestError
from pspec.runtime import memory
from pspec.runtime.batch import BatchAnswer, BatchDecoder, BatchRequest, draw
from pspec.runtime.bundle import open_bundle
from pspec.runtime.fused import cache_bytes
from pspec.runtime.generate import GenerationConfig, Generator
from test_decode import make_prompt

ROWS = 4
NO_END: dict[str, Any] = {"eos": ()}


@pytest.fixture(scope="module", params=["llama_bundle", "qwen3_bundle"])
def bundle(request: pytest.FixtureRequest) -> TinyBundle:
    result: TinyBundle = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="module")
def generator(bundle: TinyBundle) -> Generator:
    return Generator(open_bundle(bundle.folder), threads=1)


@pytest.fixture(scope="module")
def decoder(bundle: TinyBundle) -> BatchDecoder:
    return BatchDecoder(open_bundle(bundle.folder), ROWS, threads=1)


def alone(generator: Generator, request: BatchRequest) -> tuple[list[int], str]:
    """What plain decoding of one sequence says to a request."""
    end = None if request.eos is None else tuple(request.eos)
    config = GenerationConfig(max_new_tokens=request.max_new_tokens, eos_token_id=end, draft="off")
    decoding = generator.decode(config)
    prompt = list(request.prompt)
    blocks = list(decoding.run(prompt, request.max_new_tokens))
    return decoding.ids[len(prompt) :], blocks[-1].finish_reason or "" if blocks else "length"


def together(
    decoder: BatchDecoder, requests: Iterable[BatchRequest]
) -> dict[Any, tuple[list[int], str]]:
    """Answers by id."""
    return {answer.id: (answer.token_ids, answer.finish_reason) for answer in decoder.run(requests)}


def spoil(decoder: BatchDecoder) -> None:
    """Fill every slot of the cache with what must never be read."""
    decoder.engine._cache[:] = np.nan


def requests_of(lengths: Iterable[int], budgets: Iterable[int]) -> list[BatchRequest]:
    return [
        BatchRequest(make_prompt(length), budget, id=f"{number}", **NO_END)
        for number, (length, budget) in enumerate(zip(lengths, budgets, strict=True))
    ]


def test_more_prompts_than_rows(generator: Generator, decoder: BatchDecoder) -> None:
    lengths = (1, 70, 2, 3, 20, 9, 64, 65, 8, 33, 5, 81)
    budgets = (30, 3, 0, 1, 2, 24, 7, 31, 12, 1, 40, 14)
    requests = requests_of(lengths, budgets)
    spoil(decoder)

    answers = list(decoder.run(requests))

    assert {answer.id for answer in answers} == {request.id for request in requests}
    for answer in answers:
        request = requests[int(answer.id)]
        assert (answer.token_ids, answer.finish_reason) == alone(generator, request)
        assert len(answer.token_ids) == request.max_new_tokens
        assert answer.prompt_tokens == lengths[int(answer.id)]
    stats = decoder.stats
    assert stats.answers == len(requests)
    assert stats.tokens == sum(budgets)
    assert stats.prompt_tokens == sum(lengths) - lengths[budgets.index(0)]
    assert max(budgets) - 1 <= stats.steps < sum(budgets)
    assert min(stats.prefill_seconds, stats.step_seconds, stats.host_seconds) > 0


@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_budgets_and_ends(
    generator: Generator, decoder: BatchDecoder, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    requests = [
        BatchRequest(
            rng.integers(3, 250, rng.integers(1, 60)).tolist(),
            int(rng.integers(0, 36)),
            eos=rng.integers(3, 320, 12).tolist(),
            id=number,
        )
        for number in range(20)
    ]
    wanted = {request.id: alone(generator, request) for request in requests}
    assert {reason for _, reason in wanted.values()} == {"stop", "length"}
    assert together(decoder, requests) == wanted


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_fewer_prompts_than_rows(generator: Generator, decoder: BatchDecoder, count: int) -> None:
    requests = requests_of((4, 5, 6)[:count], (9, 20, 14)[:count])
    spoil(decoder)
    assert together(decoder, requests) == {one.id: alone(generator, one) for one in requests}


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_any_number_of_rows(bundle: TinyBundle, generator: Generator, rows: int) -> None:
    decoder = BatchDecoder(open_bundle(bundle.folder), rows, threads=1)
    requests = requests_of((3, 4, 5, 6, 7), (12, 5, 18, 1, 9))
    assert together(decoder, requests) == {one.id: alone(generator, one) for one in requests}


def test_each_position_declared_the_end(generator: Generator, decoder: BatchDecoder) -> None:
    prompt = make_prompt(6)
    answer, _ = alone(generator, BatchRequest(prompt, 24, **NO_END))
    requests = [BatchRequest(prompt, 24, {token}, id=n) for n, token in enumerate(answer)]
    for position, (tokens, reason) in together(decoder, requests).items():
        first = answer.index(answer[position])
        assert (tokens, reason) == (answer[: first + 1], "stop")


def test_the_bundles_own_end_tokens_count(generator: Generator, decoder: BatchDecoder) -> None:
    (eos,) = generator.bundle.manifest.target.eos_token_ids
    rng = np.random.default_rng(5)
    ended = 0
    for _ in range(10):
        requests = [BatchRequest(rng.integers(3, 250, 5).tolist(), 80, id=n) for n in range(10)]
        for request_id, (tokens, reason) in together(decoder, requests).items():
            assert (tokens, reason) == alone(generator, requests[request_id])
            assert (tokens[-1] == eos) == (reason == "stop")
            ended += reason == "stop"
        if ended:
            break
    assert ended


def test_the_context_ends(generator: Generator, decoder: BatchDecoder) -> None:
    context = generator.bundle.manifest.plan.max_context
    assert decoder.context == context
    requests = requests_of([context - left for left in (1, 2, 3, 5, 9)], [500] * 5)
    answers = together(decoder, requests)
    assert [len(answers[f"{n}"][0]) for n in range(5)] == [1, 2, 3, 5, 9]
    assert answers == {one.id: alone(generator, one) for one in requests}


def test_a_shorter_context_is_a_smaller_cache(bundle: TinyBundle, generator: Generator) -> None:
    opened = open_bundle(bundle.folder)
    decoder = BatchDecoder(opened, 3, context=20, threads=1)
    requests = requests_of((1, 12, 19), (500, 500, 500))
    answers = together(decoder, requests)
    for number, room in enumerate((19, 8, 1)):
        request = BatchRequest(requests[number].prompt, room, **NO_END)
        assert answers[f"{number}"] == alone(generator, request)
    assert decoder.engine._cache.nbytes == cache_bytes(opened.manifest, "target", 3, 20)
    assert cache_bytes(opened.manifest, "target", 3, 20) < cache_bytes(
        opened.manifest, "target", 3, 96
    )
    with pytest.raises(RequestError, match="the prompt has 20 tokens, a row holds 20"):
        list(decoder.run([BatchRequest(make_prompt(20))]))


def test_answers_come_when_they_are_finished(decoder: BatchDecoder) -> None:
    requests = requests_of((3, 3, 3, 3, 3, 3), (6, 2, 6, 1, 0, 3))
    order = [answer.id for answer in decoder.run(requests)]
    # 3 ends with its prefill, 4 needs none and 5 has the row; 0 and 2 end in one step.
    assert order == ["3", "4", "1", "5", "0", "2"]


def test_prompts_are_asked_for_as_rows_get_free(decoder: BatchDecoder) -> None:
    asked: list[str] = []
    given: list[str] = []

    def stream() -> Iterator[BatchRequest]:
        for request in requests_of((3,) * 7, (4, 2, 8, 8, 8, 8, 8)):
            asked.append(f"{request.id} after {len(given)}")
            yield request

    given.extend(answer.id for answer in decoder.run(stream()))
    first = [f"{number} after 0" for number in range(4)]
    assert asked == [*first, "4 after 1", "5 after 2", "6 after 4"]


def test_an_answer_may_bring_the_next_prompt(generator: Generator, decoder: BatchDecoder) -> None:
    waiting = [BatchRequest(make_prompt(4), 5, **NO_END)]
    answers: list[BatchAnswer] = []

    def stream() -> Iterator[BatchRequest]:
        while waiting:
            yield waiting.pop()

    # One row: its answer is there before the next prompt is asked for.
    single = BatchDecoder(generator.bundle, 1, threads=1)
    for answer in single.run(stream()):
        answers.append(answer)
        if len(answers) < 3:
            prompt = [*make_prompt(4), *answer.token_ids]
            waiting.append(BatchRequest(prompt, 5, **NO_END))
    assert [answer.index for answer in answers] == [0, 1, 2]
    last = BatchRequest([*make_prompt(4), *answers[1].token_ids], 5, **NO_END)
    assert (answers[2].token_ids, "length") == alone(generator, last)


def sampled(count: int) -> list[BatchRequest]:
    return [
        BatchRequest(make_prompt(n % 5 + 3), 10 + n, (), temperature=0.8, seed=n, id=n)
        for n in range(count)
    ]


def test_samples_depend_on_the_seed_alone(bundle: TinyBundle, decoder: BatchDecoder) -> None:
    requests = sampled(9)
    wanted = together(decoder, requests)
    assert together(decoder, requests) == wanted
    for rows, order in ((1, requests), (2, requests[::-1]), (6, requests[3:] + requests[:3])):
        other = BatchDecoder(open_bundle(bundle.folder), rows, threads=1)
        assert together(other, order) == wanted
    for request in requests[:3]:
        assert together(decoder, [request]) == {request.id: wanted[request.id]}


def test_greedy_rows_beside_sampled_ones(generator: Generator, decoder: BatchDecoder) -> None:
    greedy = requests_of((3, 4, 5), (14, 3, 20))
    mixed = [one for pair in zip(greedy, sampled(3), strict=True) for one in pair]
    answers = together(decoder, mixed)
    for request in greedy:
        assert answers[request.id] == alone(generator, request)


def test_seeds_and_temperatures_differ(decoder: BatchDecoder) -> None:
    prompt = make_prompt(5)
    requests = [
        BatchRequest(prompt, 24, (), temperature, seed, id=(temperature, seed))
        for temperature in (0.0, 1e-300, 0.8, 5.0)
        for seed in (1, 2)
    ]
    answers = {
        request_id: tuple(ids) for request_id, (ids, _) in together(decoder, requests).items()
    }
    cold = {answers[key] for key in answers if key[0] < 0.1}
    assert len(cold) == 1
    assert len(set(answers.values())) == 5


def test_draw_follows_the_distribution() -> None:
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([0.1, 0.0, 0.6, 0.3, 0.0], np.float32))
    uniforms = (np.arange(1000) + 0.5) / 1000
    counts = np.bincount([draw(logits, 1.0, u) for u in uniforms], minlength=5)
    assert counts.tolist() == [100, 0, 600, 300, 0]
    sharper = np.bincount([draw(logits, 0.5, u) for u in uniforms], minlength=5) / 1000
    wanted = np.array([0.1, 0, 0.6, 0.3, 0]) ** 2
    assert np.abs(sharper - wanted / wanted.sum()).max() <= 1e-3
    # The ends of the interval stay inside the tokens that have a chance.
    assert draw(logits, 1.0, 0.0) == 0
    assert draw(logits, 1.0, np.nextafter(1.0, 0.0)) == 3
    assert draw(np.array([1, 3, 3, 2], np.float32), 5e-324, 0.7) == 2


def test_samples_come_from_the_logits_of_the_graph(
    generator: Generator, decoder: BatchDecoder
) -> None:
    """The chosen tokens, worked out from one-shot prefills."""
    request = sampled(1)[0]
    (tokens, _) = together(decoder, [request])[0]
    rng = np.random.default_rng(0)
    ids = list(request.prompt)
    for token in tokens:
        target = generator._target
        target.start()
        for _ in target.prefill(ids):
            pass
        assert target._binding is not None
        logits = target._binding.outputs["logits"][0, 0]
        assert draw(logits, 0.8, rng.random()) == token
        ids.append(token)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": []}, "request 0: the prompt is empty"),
        ({"prompt": [5, 10**6]}, "request 0: token id 1000000 is not in 0"),
        ({"prompt": "text"}, "request 0: token ids cannot be str"),
        ({"prompt": [1.5]}, "request 0: token id 1.5 is no whole number"),
        ({"prompt": [5] * 96}, "request 0: the prompt has 96 tokens, a row holds 96"),
        ({"eos": [320]}, "request 0: end token 320 is not in 0..319"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"temperature": -0.5}, "temperature -0.5 is no finite"),
        ({"temperature": float("nan")}, "temperature nan is no finite"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": None}, "seed is None"),
        ({"eos": [-2]}, "end token -2 is"),
        ({"eos": 2}, "end tokens cannot be int"),
    ],
)
def test_bad_requests_are_refused(
    decoder: BatchDecoder, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message.replace(".", r"\.")) as caught:
        list(decoder.run([BatchRequest(**({"prompt": [5]} | request_))]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("request_", [None, [5, 6], "5"])
def test_what_is_no_request_is_refused(decoder: BatchDecoder, request_: Any) -> None:
    with pytest.raises(RequestError, match="expected a BatchRequest, got"):
        list(decoder.run([request_]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, r"rows is 0, expected a whole number in 1\.\.64"),
        ({"rows": 65}, "rows is 65"),
        ({"rows": 2.0}, "rows is 2.0"),
        ({"context": 97}, r"context is 97, expected a whole number in 2\.\.96"),
        ({"context": 1}, "context is 1"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_bad_settings_are_refused(
    llama_bundle: TinyBundle, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        BatchDecoder(open_bundle(llama_bundle.folder), **{"rows": 2, **options})


def test_a_refused_request_leaves_nothing_behind(
    generator: Generator, decoder: BatchDecoder
) -> None:
    good = requests_of((3, 4, 5), (9, 9, 9))
    with pytest.raises(RequestError, match="the prompt is empty"):
        list(decoder.run([*good, BatchRequest([])]))
    assert together(decoder, good) == {one.id: alone(generator, one) for one in good}


def test_an_abandoned_run_leaves_nothing_behind(
    generator: Generator, decoder: BatchDecoder
) -> None:
    good = requests_of((3, 4, 5, 6, 7), (9, 2, 9, 9, 4))
    wanted = {one.id: alone(generator, one) for one in good}
    for taken in range(4):
        answers = decoder.run(requests_of((30, 40, 50, 60, 70), (3, 4, 5, 6, 7)))
        for _ in range(taken):
            next(answers)
        assert together(decoder, good) == wanted


def test_a_second_run_ends_the_first_one_loudly(decoder: BatchDecoder) -> None:
    first = decoder.run(requests_of((3, 4), (3, 9)))
    next(first)
    list(decoder.run(requests_of((5, 6), (9, 9))))
    with pytest.raises(RequestError, match="another run took the batch over"):
        list(first)
    # Prompts made of the answers of a run on the same rows.
    inner = decoder.run(requests_of((3, 4), (3, 9)))
    with pytest.raises(RequestError, match="another run took the batch over"):
        list(decoder.run(BatchRequest(one.token_ids) for one in inner))


def test_a_cache_beyond_the_memory_is_refused(
    llama_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_bundle(llama_bundle.folder)
    needed = cache_bytes(opened.manifest, "target", 64, 96)
    monkeypatch.setattr(memory, "free_bytes", lambda: needed)
    with pytest.raises(EngineError, match=r"the target with 64 x 96 tokens .* use fewer rows or"):
        BatchDecoder(opened, 64)
    monkeypatch.setattr(memory, "free_bytes", lambda: 100 << 20)
    BatchDecoder(opened, 64, 1, context=10)


def test_buffers_do_not_grow_with_the_rows_that_are_busy(decoder: BatchDecoder) -> None:
    """All steps write the same arrays, and prompts of one length on any row do."""
    list(decoder.run(requests_of((5,) * 9, range(1, 10))))
    many = list(decoder.engine._arrays)
    list(decoder.run(requests_of((5,) * 9, range(9, 0, -1))))
    assert list(decoder.engine._arrays) == many
    steps = [binding.outputs["logits"] for binding in decoder._batch._steps.values()]
    assert len(steps) > 1
    assert all(np.shares_memory(array, steps[0]) for array in steps)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_context": 3}, {"nodes": 1}, {"batch": 2}])
def test_odd_bundles(tmp_path: Path, options: dict[str, Any]) -> None:
    bundle = open_bundle(tiny_bundle(tmp_path, "llama", **options).folder)
    decoder = BatchDecoder(bundle, 3, threads=1)
    lengths = [length for length in (1, 2, 5, 70) if length < decoder.context]
    requests = requests_of(lengths * 2, [12] * (2 * len(lengths)))
    answers = together(decoder, requests)
    single = BatchDecoder(bundle, 1, threads=1)
    for request in requests:
        assert together(single, [request]) == {request.id: answers[request.id]}
