"""Batched plain decoding: every row says what it says alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bundles import TinyBundle
from pspec.errors import RequestError
from pspec.runtime.batch import BatchAnswer, BatchDecoder, BatchRequest
from pspec.runtime.bundle import open_bundle
from pspec.runtime.generate import GenerationConfig, Generator
from tiny import VOCAB_SIZE

BUNDLES = ["llama_bundle", "qwen3_bundle"]
CONTEXT = 96


@pytest.fixture(params=BUNDLES)
def bundle(request: pytest.FixtureRequest) -> TinyBundle:
    found: TinyBundle = request.getfixturevalue(request.param)
    return found


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [
        rng.integers(3, VOCAB_SIZE, int(rng.integers(1, longest))).tolist() for _ in range(count)
    ]


def run(bundle: TinyBundle, rows: int, requests: Sequence[BatchRequest]) -> dict[int, BatchAnswer]:
    decoder = BatchDecoder(open_bundle(bundle.folder), rows, 2)
    answers = list(decoder.run(requests))
    assert sorted(one.index for one in answers) == list(range(len(requests)))
    return {one.index: one for one in answers}


def alone(bundle: TinyBundle, request: BatchRequest) -> tuple[list[int], str | None]:
    """Through the decoding loop, which knows nothing of batches."""
    generator = Generator.open(bundle.folder, engine="standard", threads=2)
    config = GenerationConfig(draft="off", eos_token_id=tuple(request.eos))
    blocks = list(generator.decode(config).run(list(request.prompt), request.max_new_tokens))
    return [token for block in blocks for token in block.tokens], blocks[-1].finish_reason


@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_rows_say_what_they_say_alone(rows: int, bundle: TinyBundle) -> None:
    budgets = [1, 2, 30, 7, 12, 3, 20, 9, 5, 25, 4]
    requests = [
        BatchRequest(prompt, budget) for prompt, budget in zip(prompts(11), budgets, strict=True)
    ]
    answers = run(bundle, rows, requests)
    for index, request in enumerate(requests):
        assert (answers[index].token_ids, answers[index].finish_reason) == alone(bundle, request)


def test_an_answer_ends_at_its_own_tokens(llama_bundle: TinyBundle) -> None:
    plain = run(llama_bundle, 4, [BatchRequest(prompt, 20) for prompt in prompts(6)])
    requests = [
        BatchRequest(prompt, 20, frozenset({plain[index].token_ids[index * 3]}))
        for index, prompt in enumerate(prompts(6))
    ]
    for index, answer in run(llama_bundle, 4, requests).items():
        end = plain[index].token_ids.index(*requests[index].eos)
        assert answer.token_ids == plain[index].token_ids[: end + 1]
        assert answer.finish_reason == "stop"


def test_the_context_ends_an_answer(llama_bundle: TinyBundle) -> None:
    requests = [BatchRequest([5] * length, 200) for length in (CONTEXT - 1, CONTEXT - 3, 30)]
    answers = run(llama_bundle, 2, requests)
    for index, request in enumerate(requests):
        assert (answers[index].token_ids, answers[index].finish_reason) == alone(
            llama_bundle, request
        )
        assert len(request.prompt) + len(answers[index].token_ids) == CONTEXT


def test_a_finished_row_is_delivered_while_others_run(llama_bundle: TinyBundle) -> None:
    budgets = [30, 2, 30, 1, 4]
    requests = [BatchRequest(p, b) for p, b in zip(prompts(5), budgets, strict=True)]
    decoder = BatchDecoder(open_bundle(llama_bundle.folder), 3, 2)
    order = [one.index for one in decoder.run(requests)]
    assert order[:2] == [1, 3]
    assert set(order[-2:]) == {0, 2}


def test_a_caller_is_asked_for_a_prompt_only_when_a_row_is_free(llama_bundle: TinyBundle) -> None:
    asked: list[int] = []

    def endless() -> object:
        for number in range(1000):
            asked.append(number)
            yield BatchRequest([5, 6], 4)

    stream = BatchDecoder(open_bundle(llama_bundle.folder), 2, 2).run(endless())  # type: ignore[arg-type]
    next(stream)
    assert len(asked) <= 4


def test_draws_depend_on_the_seed_alone(llama_bundle: TinyBundle) -> None:
    requests = [BatchRequest(p, 12, temperature=0.9, seed=i) for i, p in enumerate(prompts(7))]
    first = run(llama_bundle, 1, requests)
    for rows in (2, 7):
        again = run(llama_bundle, rows, requests)
        assert {i: one.token_ids for i, one in again.items()} == {
            i: one.token_ids for i, one in first.items()
        }
    other = [BatchRequest(p, 12, temperature=0.9, seed=99) for p in prompts(7)]
    changed = run(llama_bundle, 7, other)
    assert any(changed[i].token_ids != first[i].token_ids for i in first)


def test_draws_follow_the_distribution(llama_bundle: TinyBundle) -> None:
    """Of the first token, against the engine's own logits."""
    decoder = BatchDecoder(open_bundle(llama_bundle.folder), 1, 2)
    requests = [BatchRequest([7, 8], 1, temperature=1.5, seed=seed) for seed in range(2000)]
    drawn = [one.token_ids[0] for one in decoder.run(requests)]
    binding = decoder.engine.bind_rows(2, 1, range(1))
    scaled = binding.outputs["logits"][0, 0].astype(np.float64) / 1.5
    chances = np.exp(scaled - scaled.max())
    chances /= chances.sum()
    seen = np.bincount(drawn, minlength=len(chances)) / len(drawn)
    assert np.abs(seen - chances).sum() / 2 < 3 * np.sqrt(len(chances) / len(drawn)) / 2


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (BatchRequest([], 4), "0 tokens"),
        (BatchRequest([5] * CONTEXT, 4), "96 tokens"),
        (BatchRequest([VOCAB_SIZE], 4), "token ids outside"),
        (BatchRequest([5], 0), "max_new_tokens is 0"),
        (BatchRequest([5], 4, temperature=float("nan")), "temperature is nan"),
        (BatchRequest([5], 4, temperature=-1), "temperature is -1"),
    ],
)
def test_a_bad_request_is_refused(
    request_: BatchRequest, said: str, llama_bundle: TinyBundle
) -> None:
    with pytest.raises(RequestError, match=said):
        list(BatchDecoder(open_bundle(llama_bundle.folder), 2, 2).run([request_]))


@pytest.mark.parametrize("rows", [0, 65])
def test_a_bad_number_of_rows_is_refused(rows: int, llama_bundle: TinyBundle) -> None:
    with pytest.raises(RequestError, match="1 to 64"):
        BatchDecoder(open_bundle(llama_bundle.folder), rows)
