"""llama.cpp's own server inside xllamacpp, asked over the loopback interface.

Its times are the server's: ``prompt_ms`` until the first token, ``predicted_ms`` from there on.
``lookup`` is ``ngram-simple``: draft what followed the last n-gram where it stood before.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import xllamacpp
from protocol import Answer, Loaded, Start, serve


def load(start: Start) -> Loaded:
    """One slot, nothing kept between prompts."""
    params = xllamacpp.CommonParams()
    params.model.path = start.model
    params.n_ctx = start.context
    params.n_parallel = 1
    params.cpuparams.n_threads = start.threads
    params.cpuparams_batch.n_threads = start.threads
    params.cache_ram_mib = 0
    params.port = 0
    if start.mode == "lookup":
        kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
        params.speculative.types = [kind]
        params.speculative.ngram_simple.size_n = start.ngram
        params.speculative.ngram_simple.size_m = start.drafted
        params.speculative.draft.n_max = start.drafted
    server = xllamacpp.Server(params)

    def generate(ids: list[int], count: int) -> Answer:
        body = {
            "prompt": ids,
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        return answer_of(_post(f"{server.listening_address}/completion", body))

    return generate, {"system": xllamacpp.get_system_info(), "lookup": "ngram-simple"}


def answer_of(reply: dict[str, Any]) -> Answer:
    """The server's reply as the driver wants it."""
    times, ids = reply["timings"], reply["tokens"]
    return Answer(
        seconds_prefill=times["prompt_ms"] / 1e3,
        seconds_decode=times["predicted_ms"] / 1e3,
        tokens=len(ids),
        ids=ids,
        rounds=len(ids) - 1 - times.get("draft_n_accepted", 0),
    )


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as reply:
        result: dict[str, Any] = json.load(reply)
    return result


if __name__ == "__main__":
    serve(load, ("xllamacpp",))
