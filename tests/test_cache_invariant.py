"""After every round each cache holds exactly the rows of a fresh prefill over what is committed.

Rounds are random: trees whose right branch is anywhere, plain steps, prompt lookup, the bundle's
own drafter, and long stretches in which the drafter is not asked. The reference is one causal pass
of the PyTorch modules over the whole sequence, whose first n rows are a fresh prefill of n tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bundles import TinyBundle, tiny_bundle
from pspec.models.checkpoint import load_target
from pspec.models.decoder import TargetGraph
from pspec.models.drafter_file import read_drafter
from pspec.models.drafter_graph import DrafterGraph
from pspec.models.graph import GraphModel, run_graph
from pspec.runtime.bundle import open_bundle
from pspec.runtime.decode import Decoding
from pspec.runtime.drafter import ParallelDrafter
from pspec.runtime.engines import ENGINES
from pspec.runtime.generate import GenerationConfig, Generator
from pspec.runtime.lookup import PromptLookup
from pspec.runtime.tree import Proposal

Rows = NDArray[np.float32]
FEATURES = (0, 1, 2)


@dataclass
class Snapshot:
    """A cache at one moment: committed tokens, and its rows ``[L, 2, heads, length, D]``."""

    committed: int
    rows: Rows


@dataclass
class RandomDrafter:
    """Proposes at random, and has the bundle's drafter follow everything that is committed."""

    own: ParallelDrafter
    lookup: PromptLookup
    answer: list[int]
    rng: random.Random
    name: str = "random"
    slots: int = 4
    committed: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.own.seconds

    def start(self, token: int) -> None:
        self.committed = 1
        self.own.start(token)
        self.lookup.start(token)

    def observe(self, tokens: Sequence[int], features: NDArray[np.float32] | None) -> None:
        self.committed += len(tokens)
        self.own.observe(tokens, features)
        self.lookup.observe(tokens, features)

    def truncate(self, tokens: int) -> None:
        raise AssertionError("nothing is cut here")

    def propose(self) -> Proposal | None:
        # Long stretches without a draft call: pairs wait, and are fed in chunks later.
        quiet = (self.committed // 100) % 2 == 1
        kind = self.rng.choice(["hidden", "hidden", "plain", "lookup"] + ["own"] * (not quiet))
        self.kinds.append(kind)
        if kind == "own":
            proposal = self.own.propose()
            rows = np.asarray(self.own.engine.cache_rows(0))
            self.snapshots.append(Snapshot(self.committed, rows))
            return proposal
        if kind == "lookup":
            return self.lookup.propose()
        return self._hidden() if kind == "hidden" else None

    def _hidden(self) -> Proposal:
        """The right continuation at a random rank of each slot, likelier than not to be reached."""
        right = self.answer[self.committed : self.committed + self.slots]
        right += [0] * (self.slots - len(right))
        ids = np.empty((self.slots, 3), np.int32)
        for slot, token in enumerate(right):
            row = [(token + 1 + rank) % 300 for rank in range(2)]
            row.insert(self.rng.randrange(3), token)
            ids[slot] = row
        shares = np.sort(np.asarray([[self.rng.random() for _ in range(3)] for _ in right]))
        shares = shares[:, ::-1] / shares.sum(1, keepdims=True)
        return Proposal(ids, np.log(shares.astype(np.float32)))


def reference_rows(model: GraphModel, feeds: dict[str, torch.Tensor], layers: int) -> Rows:
    """New rows of one call over everything, ``[L, 2, heads, length, D]``."""
    result = run_graph(model, feeds)
    parts = [[result[f"new_{part}.{n}"][0] for part in ("key", "value")] for n in range(layers)]
    return torch.stack([torch.stack(pair) for pair in parts]).numpy()


def empty_cache(model: GraphModel) -> dict[str, torch.Tensor]:
    """One slot that does not count."""
    sizes = [value for value in model.inputs if value.name.startswith("past_")]
    shapes = {v.name: [dim if isinstance(dim, int) else 1 for dim in v.shape] for v in sizes}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def target_reference(bundle: TinyBundle, ids: list[int], features: Any) -> tuple[Rows, Any]:
    """Rows and features of the target over ``ids``."""
    target = load_target(str(bundle.target_folder))
    model = TargetGraph(target.decoder, positions=len(ids), features=features)
    count = len(ids)
    feeds = empty_cache(model) | {
        "token_ids": torch.tensor([ids], dtype=torch.int32),
        "position_ids": torch.arange(count, dtype=torch.int32)[None],
        "tree_mask": torch.ones(count, count).tril().bool()[None],
        "cache_length": torch.zeros(1, dtype=torch.int32),
        "logit_rows": torch.zeros(1, 1, dtype=torch.int32),
    }
    rows = reference_rows(model, feeds, target.config.num_layers)
    return rows, run_graph(model, feeds).get("feature")


def drafter_reference(bundle: TinyBundle, ids: list[int], features: Any) -> Rows:
    """Rows of the drafter over the pairs of ``ids``: shifted with features, or the tokens alone."""
    drafter = read_drafter(bundle.drafter_folder)
    target = load_target(str(bundle.target_folder))
    model = DrafterGraph(drafter, target.decoder, positions=len(ids))
    tokens = ids[1:] if drafter.config.shift else ids
    feeds = empty_cache(model) | {
        "token_ids": torch.tensor([tokens], dtype=torch.int32),
        "token_count": torch.tensor([len(tokens)], dtype=torch.int32),
        "cache_length": torch.zeros(1, dtype=torch.int32),
    }
    if features is not None:
        feeds["feature"] = features[:, : len(tokens)]
    return reference_rows(model, feeds, drafter.config.num_layers)


def plain_ids(generator: Generator, prompt: list[int], count: int) -> list[int]:
    decoding = generator.decode(GenerationConfig(eos_token_id=(), draft="off"))
    for _ in decoding.run(prompt, count):
        pass
    return decoding.ids


def run_rounds(
    bundle: TinyBundle, prompt: list[int], count: int, seed: int, engine: str
) -> list[str]:
    """Decode with random rounds, then compare every snapshot; returns the kinds of rounds."""
    generator = Generator(open_bundle(bundle.folder), engine=engine)
    answer = plain_ids(generator, prompt, count)
    own = generator.decode(GenerationConfig(draft="bundle")).drafter
    assert isinstance(own, ParallelDrafter)
    drafter = RandomDrafter(own, PromptLookup(own.slots), answer, random.Random(seed))
    decoding: Decoding = generator.decode(GenerationConfig(eos_token_id=()), drafter)
    targets = []
    for _ in decoding.run(prompt, count):
        rows = np.asarray(decoding.target.engine.cache_rows(0))
        targets.append(Snapshot(len(decoding.ids), rows))

    assert decoding.ids == answer
    config = read_drafter(bundle.drafter_folder).config
    wanted, features = target_reference(
        bundle, answer, () if config.features == "none" else config.features
    )
    assert len({snapshot.committed for snapshot in targets}) == len(targets)
    for snapshot in targets:
        length = snapshot.committed - 1
        assert snapshot.rows.shape[3] == length
        np.testing.assert_allclose(snapshot.rows, wanted[:, :, :, :length], rtol=0, atol=1e-5)
    drafted = drafter_reference(bundle, answer, features)
    assert drafter.snapshots
    for snapshot in drafter.snapshots:
        length = snapshot.committed - (1 if config.shift else 0)
        assert snapshot.rows.shape[3] == length
        np.testing.assert_allclose(snapshot.rows, drafted[:, :, :, :length], rtol=0, atol=1e-5)
    assert decoding.stats.accepted > 10, "the trees never hid the right branch where it was found"
    return drafter.kinds


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    """Three cache buckets: 256, 512 and 600 slots; heads that a fused attention rotates itself."""
    folder = tmp_path_factory.mktemp("wide")
    return tiny_bundle(folder, "llama", positions=600, max_context=600, head_dim=16)


@pytest.fixture(scope="module")
def unshifted(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    """A drafter in PARD's manner: tokens alone, not shifted, one shared mask."""
    drafter = {
        "features": "none",
        "fuse": "none",
        "mask_feature": "none",
        "mask_embedding": "shared",
        "shift": False,
    }
    return tiny_bundle(tmp_path_factory.mktemp("unshifted"), "qwen3", drafter=drafter)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_hundreds_of_rounds_across_cache_buckets(wide_llama: TinyBundle, engine: str) -> None:
    kinds = run_rounds(wide_llama, [5, 6, 7, 8, 9], 590, 0, engine)

    assert len(kinds) > 200
    assert min(kinds.count(kind) for kind in ("hidden", "plain", "lookup", "own")) > 20


@pytest.mark.parametrize(
    ("seed", "engine"), [(0, "onnxruntime"), (1, "onnxruntime"), (2, "standard")]
)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_every_family_and_drafter(
    llama_bundle: TinyBundle,
    qwen3_bundle: TinyBundle,
    unshifted: TinyBundle,
    seed: int,
    length: int,
    engine: str,
) -> None:
    prompt = [random.Random(length).randrange(3, 300) for _ in range(length)]
    for bundle in (llama_bundle, qwen3_bundle, unshifted):
        run_rounds(bundle, prompt, 96 - length, seed, engine)
