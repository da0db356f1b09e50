"""pspec beside its peers: plain decoding, or prompt lookup, over a bundle."""

from __future__ import annotations

import time

from protocol import Answer, Loaded, Start, serve

from pspec.runtime.generate import DraftMode, GenerationConfig, Generator


def load(start: Start) -> Loaded:
    """A bundle's generator; what is drafted and looked up is the bundle's own choice."""
    generator = Generator.open(start.model, threads=start.threads)
    plan = generator.bundle.manifest.plan
    draft: DraftMode = "off" if start.mode == "plain" else "lookup"
    config = GenerationConfig(eos_token_id=(), draft=draft)

    def generate(ids: list[int], count: int) -> Answer:
        decoding = generator.decode(config)
        blocks = decoding.run(ids, count)
        begin = time.perf_counter()
        next(blocks)
        first = time.perf_counter()
        for _ in blocks:
            pass
        end = time.perf_counter()
        answer = decoding.ids[len(ids) :]
        return Answer(first - begin, end - first, len(answer), answer, decoding.stats.rounds)

    settings = {"precision": generator.bundle.manifest.precision, "drafted": plan.accepted - 1}
    return generate, settings | {"max_context": plan.max_context}


if __name__ == "__main__":
    serve(load, ("numpy", "onnxruntime"))
