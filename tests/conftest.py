"""Fixtures that several test files share; each bundle is exported once a session."""

from __future__ import annotations

import pytest

from bundles import TinyBundle, tiny_bundle


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
