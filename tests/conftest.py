"""Fixtures that several test files share; each bundle is exported once a session."""

from __future__ import annotations

import pytest

from bundles import TinyBundle, tiny_bundle
from crafted_bundle import CraftedBundle, crafted_bundle
from graphs import Traced, trace_tiny


@pytest.fixture(scope="session")
def llama_bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    """A tiny Llama with a random parallel drafter (K = 4, 8 nodes, context 96)."""
    return tiny_bundle(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def qwen3_bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    """A tiny Qwen3 whose drafter has another shape: dual norm, trimmed head, two layers."""
    drafter = {
        "fuse": "dual-norm",
        "mask_feature": "shared",
        "num_layers": 2,
        "head": "own",
        "draft_vocab_size": 100,
    }
    return tiny_bundle(tmp_path_factory.mktemp("qwen3"), "qwen3", drafter=drafter)


@pytest.fixture(scope="session")
def crafted(tmp_path_factory: pytest.TempPathFactory) -> CraftedBundle:
    """A target and drafter with known rounds; no features, no shift (K = 4, 16 nodes)."""
    return crafted_bundle(tmp_path_factory.mktemp("crafted"), shift=False)


@pytest.fixture(scope="session")
def crafted_shifted(tmp_path_factory: pytest.TempPathFactory) -> CraftedBundle:
    """The same, the drafter paired with features."""
    return crafted_bundle(tmp_path_factory.mktemp("shifted"), shift=True)


@pytest.fixture(scope="session")
def llama_graphs(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Frozen graphs of a tiny Llama and an EAGLE-like drafter."""
    return trace_tiny(tmp_path_factory.mktemp("llama-graphs"), "llama")


@pytest.fixture(scope="session")
def qwen3_graphs(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A tied head, the normed state as feature, a two-layer dual-norm drafter with few tokens."""
    drafter = {
        "fuse": "dual-norm",
        "mask_feature": "shared",
        "num_layers": 2,
        "head": "own",
        "draft_vocab_size": 100,
    }
    folder = tmp_path_factory.mktemp("qwen3-graphs")
    return trace_tiny(folder, "qwen3", features="last", drafter=drafter, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def pair_graphs(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Two rows a call, biases everywhere, and a drafter that adds features to tokens."""
    drafter = {
        "fuse": "scaled-add",
        "mask_feature": "repeat",
        "slot_attention": "blind",
        "embedding": "own",
        "input_norm": False,
        "fc_bias": True,
    }
    biases = {"attention_bias": True, "mlp_bias": True}
    folder = tmp_path_factory.mktemp("pair-graphs")
    return trace_tiny(folder, "llama", batch=2, features=(0,), drafter=drafter, **biases)
