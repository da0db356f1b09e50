"""onnxruntime-genai: its generator, plain or with its n-gram drafting."""

from __future__ import annotations

import json
import time

import onnxruntime_genai as og
from protocol import Answer, Loaded, Start, serve

_NEVER = 49151
"""The last id of SmolLM2's vocabulary, a rare piece: the peer has no switch to ignore its EOS."""


def load(start: Start) -> Loaded:
    """The builder's folder, with its threads set and its end-of-sequence tokens taken away."""
    config = og.Config(start.model)
    session = {"intra_op_num_threads": start.threads}
    # One id: a list would be appended to the file's.
    overlay = {"model": {"eos_token_id": _NEVER, "decoder": {"session_options": session}}}
    config.overlay(json.dumps(overlay))
    model = og.Model(config)

    def generate(ids: list[int], count: int) -> Answer:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(ids) + count)
        if start.mode == "lookup":
            params.set_speculative_options(ngram_size=start.ngram, max_draft_tokens=start.drafted)
        generator = og.Generator(model, params)
        begin = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        end = time.perf_counter()
        answer = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
        rounds = rounds_of(generator, len(answer), start.mode)
        return Answer(first - begin, end - first, len(answer), answer, rounds)

    return generate, {"end of sequence": f"moved to id {_NEVER}"}


def rounds_of(generator: og.Generator, tokens: int, mode: str) -> int:
    """Rounds after prefill: drafted ones, and steps where the lookup found nothing."""
    if mode == "plain":
        return tokens - 1
    stats = generator.get_speculative_stats()
    return int(stats["completed_rounds"] + stats["standard_fallback_steps"] - 1)


if __name__ == "__main__":
    serve(load, ("onnxruntime-genai", "onnxruntime"))
