"""OpenVINO GenAI's ``LLMPipeline``, plain or with its prompt lookup.

Its default backend is paged attention with a latency-minded scheduler that caches prefixes. The
cache is switched off here, for prompts come again; the rest is as by default.
"""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai as genai
from protocol import Answer, Loaded, Start, serve


def load(start: Start) -> Loaded:
    """A pipeline on the CPU."""
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = start.context
    options = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": start.threads}
    if start.mode == "lookup":
        options["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(start.model, "CPU", **options)

    def generate(ids: list[int], count: int) -> Answer:
        rows = np.array([ids], dtype=np.int64)
        tensors = openvino.Tensor(rows), openvino.Tensor(np.ones_like(rows))
        config = _config(start, count)
        return answer_of(pipeline.generate(genai.TokenizedInputs(*tensors), config))

    return generate, {"backend": "paged attention, no prefix cache"}


def _config(start: Start, count: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = count
    config.ignore_eos = True
    config.do_sample = False
    if start.mode == "lookup":
        config.num_assistant_tokens = start.drafted
        config.max_ngram_size = start.ngram
    return config


def answer_of(result: genai.EncodedResults) -> Answer:
    """The pipeline's own account: a time stamp for each of its steps."""
    metrics = result.perf_metrics
    ids = [int(token) for token in result.tokens[0]]
    prefill = metrics.get_ttft().mean / 1e3
    return Answer(
        seconds_prefill=prefill,
        seconds_decode=metrics.get_generate_duration().mean / 1e3 - prefill,
        tokens=len(ids),
        ids=ids,
        rounds=len(metrics.raw_metrics.m_new_token_times) - 1,
    )


if __name__ == "__main__":
    serve(load, ("openvino-genai", "openvino"))
