"""The fused engine gives a token the same logits to the last bit, whatever else runs with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bundles import tiny_bundle
from pspec.runtime.bundle import open_bundle
from pspec.runtime.engine import Array, Engine
from pspec.runtime.engines import open_engine
from tiny import VOCAB_SIZE

IDS = np.random.default_rng(3).integers(3, VOCAB_SIZE, 61, dtype=np.int32)


def read(engine: Engine, size: int) -> tuple[Array, Array]:
    """Logits and cache after reading the tokens in calls of ``size``."""
    engine.truncate(0, 0)
    found = []
    for start in range(0, len(IDS), size):
        part = IDS[start : start + size]
        count = engine.fit(len(part))
        binding = engine.bind(count, count)
        inputs = binding.inputs
        inputs["token_ids"][0, : len(part)] = part
        inputs["position_ids"][0] = np.minimum(start + np.arange(count), start + len(part) - 1)
        inputs["tree_mask"][0] = np.tri(count, dtype=np.bool_)
        inputs["logit_rows"][0] = np.arange(count)
        engine.run(binding, len(part))
        engine.commit(0, range(len(part)))
        found.append(binding.outputs["logits"][0, : len(part)].copy())
    return np.concatenate(found), engine.cache_rows(0)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_call_of_any_size_gives_the_same_logits(precision: str, tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path, precision=precision, min_agreement=0.0)
    engine = open_engine(open_bundle(bundle.folder), "target", "onnxruntime", 2)
    logits, cache = read(engine, 1)
    for size in (2, 3, 8, 61):
        again, rows = read(engine, size)
        np.testing.assert_array_equal(again, logits)
        np.testing.assert_array_equal(rows, cache)
