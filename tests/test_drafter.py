"""The drafter's graph against a dense reference written from docs/drafter-format.md in NumPy.

The reference knows nothing of caches, chunks, padding or stacked heads: one sequence with the mask
slots of every anchor at once, and for every query the elements that the rule lets it see.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from plain_drafter import (
    Config,
    Tensors,
    complete,
    feature_width,
    has_fc,
    random_tensors,
    write_plain,
)
from pspec.models.config import BlockConfig, RopeConfig, TargetConfig
from pspec.models.decoder import Decoder
from pspec.models.drafter_file import read_drafter
from pspec.models.drafter_graph import DrafterGraph
from pspec.models.graph import run_graph

Array = NDArray[np.float64]

LENGTH = 9
"""Real rows of a test sequence."""
CHUNK = 5
"""Rows a call can take."""
SLOTS = 16
CANDIDATES = 16
TOLERANCE = 1e-5


class Element(NamedTuple):
    """Depth 0 is a real row, depth d the d-th mask slot after it."""

    anchor: int
    depth: int


def sees(query: Element, key: Element, blind: bool) -> bool:
    if key.depth == 0:
        return key.anchor <= query.anchor
    if blind:
        return key == query
    return key.anchor == query.anchor and key.depth <= query.depth


@dataclass
class Expected:
    """What the whole sequence gives: ranked proposals per anchor, K/V rows per layer."""

    ids: NDArray[Any]
    logprobs: Array
    keys: list[Array]
    values: list[Array]


@dataclass
class Case:
    """A drafter, its target's tables and one sequence of pairs."""

    config: Config
    tensors: Tensors
    target: Decoder
    graph: DrafterGraph
    tokens: NDArray[Any]
    features: NDArray[Any]


# The reference


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def rotated(x: Array, position: int, theta: float) -> Array:
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def softmax(scores: Array) -> Array:
    exponents = np.exp(scores - scores.max())
    share: Array = exponents / exponents.sum()
    return share


def activate(name: str, x: Array) -> Array:
    if name == "silu":
        gates = [1 / (1 + math.exp(-v)) for v in x]
    elif name == "gelu":
        gates = [0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x]
    else:
        inner = [math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in x]
        gates = [0.5 * (1 + math.tanh(v)) for v in inner]
    gated: Array = x * np.array(gates)
    return gated


class Reference:
    """The model of docs/drafter-format.md over elements, one vector at a time."""

    def __init__(self, case: Case) -> None:
        self.config = case.config
        self.block = case.config["block"]
        self.weights = {name: tensor.astype(np.float64) for name, tensor in case.tensors.items()}
        table = case.target.embed_tokens.weight.numpy().astype(np.float64)
        head = case.target.lm_head
        self.embed = self.weights.get("embed_tokens.weight", table)
        borrowed = table if head is None else head.weight.numpy().T.astype(np.float64)
        self.head = self.weights.get("lm_head.weight", borrowed)
        self.tokens, self.features = case.tokens, case.features.astype(np.float64)
        anchors, depths = range(len(case.tokens)), range(case.config["slots"])
        self.elements = [Element(a, d) for a, d in itertools.product(anchors, depths)]

    def run(self) -> Expected:
        inputs = [self.fused(element) for element in self.elements]
        states = [state for _, state in inputs]
        keys, values = [], []
        for layer in range(self.config["num_layers"]):
            normed = [self.normed(layer, *pair) for pair in zip(inputs, states, strict=True)]
            mixed, key, value = self.attention(layer, normed)
            states = [s + m for s, m in zip(states, mixed, strict=True)]
            states = [s + self.mlp(layer, s) for s in states]
            real = [i for i, element in enumerate(self.elements) if element.depth == 0]
            keys.append(key[real])
            values.append(value[real])
        ids, logprobs = zip(*(self.ranked(state) for state in states), strict=True)
        shape = (len(self.tokens), self.config["slots"], -1)
        return Expected(
            np.array(ids).reshape(shape), np.array(logprobs).reshape(shape), keys, values
        )

    def linear(self, name: str, x: Array) -> Array:
        y: Array = self.weights[f"{name}.weight"] @ x
        return y + self.weights.get(f"{name}.bias", np.zeros(len(y)))

    def norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self.weights[f"{name}.weight"], self.block["norm_eps"])

    def mask_row(self, name: str, depth: int) -> Array:
        rows = self.weights[name]
        row: Array = rows[0] if len(rows) == 1 else rows[depth - 1]
        return row

    def feature(self, element: Element) -> Array:
        kind = self.config["mask_feature"]
        if element.depth == 0 or kind == "repeat":
            own: Array = self.features[element.anchor]
            return own
        if kind == "zero":
            return np.zeros(feature_width(self.config))
        return self.mask_row("mask_feature", element.depth)

    def fused(self, element: Element) -> tuple[Array, Array]:
        """The token's vector, and the state that enters the first block."""
        fuse = self.config["fuse"]
        if fuse == "feature-only":
            if element.depth:
                state = self.mask_row("mask_embedding", element.depth)
            else:
                state = self.feature(element)
                state = self.linear("fc", state) if has_fc(self.config) else state
            return state, state
        token = self.embed[self.tokens[element.anchor]]
        if element.depth:
            token = self.mask_row("mask_embedding", element.depth)
        if fuse == "none":
            return token, token
        feature = self.feature(element)
        if fuse == "concat-fc":
            state = self.linear("fc", np.concatenate([token, feature]))
        else:
            state = self.linear("fc", feature)
            if fuse == "scaled-add":
                state = token + self.config["fuse_scale"] * state
        return token, state

    def normed(self, layer: int, entry: tuple[Array, Array], state: Array) -> Array:
        """What q, k and v read."""
        name = f"layers.{layer}.input_layernorm"
        plain = layer == 0 and not self.config["input_norm"]
        if layer == 0 and self.config["fuse"] == "dual-norm":
            token = entry[0] if plain else self.norm(name, entry[0])
            return np.concatenate([token, self.norm("layers.0.hidden_norm", state)])
        return state if plain else self.norm(name, state)

    def heads(self, layer: int, part: str, x: Array) -> list[Array]:
        size = self.block["head_dim"]
        flat = self.linear(f"layers.{layer}.self_attn.{part}_proj", x)
        rows = [flat[start : start + size] for start in range(0, len(flat), size)]
        if self.block["qk_norm"] and part != "v":
            return [self.norm(f"layers.{layer}.self_attn.{part}_norm", row) for row in rows]
        return rows

    def attention(self, layer: int, inputs: list[Array]) -> tuple[list[Array], Array, Array]:
        theta = self.config["rope"]["theta"]
        places = [element.anchor + element.depth for element in self.elements]

        def turned(part: str) -> list[list[Array]]:
            split = (self.heads(layer, part, x) for x in inputs)
            return [
                [rotated(row, place, theta) for row in rows]
                for rows, place in zip(split, places, strict=True)
            ]

        query, key = turned("q"), turned("k")
        value = [self.heads(layer, "v", x) for x in inputs]
        mixed = []
        for index, element in enumerate(self.elements):
            rows = [
                self.one_head(element, row, head, key, value)
                for head, row in enumerate(query[index])
            ]
            mixed.append(self.linear(f"layers.{layer}.self_attn.o_proj", np.concatenate(rows)))
        return mixed, np.array(key), np.array(value)

    def one_head(
        self,
        element: Element,
        query: Array,
        head: int,
        key: list[list[Array]],
        value: list[list[Array]],
    ) -> Array:
        shared = self.block["num_attention_heads"] // self.block["num_key_value_heads"]
        blind = self.config["slot_attention"] == "blind"
        seen = [i for i, other in enumerate(self.elements) if sees(element, other, blind)]
        keys = np.array([key[i][head // shared] for i in seen])
        values = np.array([value[i][head // shared] for i in seen])
        mixed: Array = softmax(keys @ query / math.sqrt(len(query))) @ values
        return mixed

    def mlp(self, layer: int, state: Array) -> Array:
        prefix = f"layers.{layer}"
        x = self.norm(f"{prefix}.post_attention_layernorm", state)
        gate = activate(self.block["activation"], self.linear(f"{prefix}.mlp.gate_proj", x))
        return self.linear(
            f"{prefix}.mlp.down_proj", gate * self.linear(f"{prefix}.mlp.up_proj", x)
        )

    def ranked(self, state: Array) -> tuple[NDArray[Any], Array]:
        x = self.norm("norm", state) if self.config["final_norm"] else state
        logits = self.head @ x
        logprobs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-logprobs, kind="stable")[:CANDIDATES]
        ids = self.weights["d2t"][best].astype(np.int64) if "d2t" in self.weights else best
        return ids, logprobs[best]


# The cases

FEATURES: dict[str, Config] = {
    "concat-fc": {"features": "last"},
    "dual-norm": {"features": [0, 2], "num_layers": 2},
    "scaled-add": {"features": [1], "fuse_scale": 0.3},
}
EAGLE: Config = {"fuse": "concat-fc", "features": "last", "shift": True, "mask_feature": "slot"}
DUAL: Config = EAGLE | {"fuse": "dual-norm", "features": [0, 1, 2]}
MEDUSA: Config = {"fuse": "feature-only", "features": "last", "shift": True}
NO_NORMS = {"input_norm": False, "final_norm": False}
OWN = {"embedding": "own", "head": "own"}
NARROW = {"hidden_size": 24, "head_dim": 6}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True}
SPECIAL: dict[str, Config] = {
    "eagle without norms": EAGLE | NO_NORMS | {"fc_bias": True},
    "dual without norms": DUAL | NO_NORMS | {"num_layers": 2},
    "no norms, no features": NO_NORMS | {"num_layers": 2},
    "own tables": EAGLE | OWN,
    "own tables, another width": EAGLE | OWN | {"block": NARROW},
    "feature-only, another width": MEDUSA | {"head": "own", "fc_bias": True, "block": NARROW},
    "trimmed head": EAGLE | {"head": "own", "draft_vocab_size": 23},
    "few candidates": EAGLE | {"head": "own", "draft_vocab_size": 7},
    "biases and q/k norms": DUAL | {"block": BIASES, "num_layers": 3, "fc_bias": True},
    "one head a group": EAGLE | {"block": {"num_key_value_heads": 4, "activation": "gelu"}},
    "one group": EAGLE | {"block": {"num_key_value_heads": 1, "activation": "gelu_pytorch_tanh"}},
    "own rope": EAGLE | {"rope": {"theta": 50.0}, "block": {"norm_eps": 0.1}},
    "two slots": EAGLE | {"slots": 2},
    "one slot, none": {"slots": 1},
    "one slot, concat-fc": EAGLE | {"slots": 1},
    "one slot, dual-norm": DUAL | {"slots": 1},
    "one slot, scaled-add": EAGLE | {"slots": 1, "fuse": "scaled-add", "fuse_scale": 2.0},
    "one slot, feature-only": MEDUSA | {"slots": 1},
    "one slot, blind": {"slots": 1, "slot_attention": "blind", "mask_embedding": "shared"},
}


def cases() -> Iterator[tuple[str, Config]]:
    yield from SPECIAL.items()
    masks = list(itertools.product(("slot", "shared"), ("causal", "blind")))
    for mask, attention in masks:
        fields = {"mask_embedding": mask, "slot_attention": attention}
        yield f"none {mask} {attention}", fields
        yield f"feature-only {mask} {attention}", MEDUSA | fields
        wide = {"features": [0, 1, 2]}
        yield f"feature-only fc {mask} {attention}", MEDUSA | fields | wide
        for fuse, feature in itertools.product(FEATURES, ("slot", "shared", "zero", "repeat")):
            fused = {"fuse": fuse, "shift": True, "mask_feature": feature} | FEATURES[fuse]
            yield f"{fuse} {feature} {mask} {attention}", fields | fused


CASES = dict(cases())


def make_case(folder: Path, fields: Config, *, tied: bool = False, seed: int = 0) -> Case:
    config = complete(**fields)
    tensors = random_tensors(config, seed)
    target = make_target(tied)
    drafter = read_drafter(write_plain(folder, config, tensors))
    graph = DrafterGraph(drafter, target, positions=LENGTH + 1, candidates=CANDIDATES)
    rng = np.random.default_rng(seed + 1)
    tokens = rng.integers(0, config["target_vocab_size"], LENGTH)
    features = rng.standard_normal((LENGTH, feature_width(config))).astype(np.float32)
    return Case(config, tensors, target, graph, tokens, features)


def make_target(tied: bool) -> Decoder:
    block = BlockConfig(32, 48, 4, 2, 10)
    target = Decoder(TargetConfig("llama", 60, 2, block, RopeConfig(), tied, 64))
    generator = torch.Generator().manual_seed(5)
    for parameter in target.requires_grad_(False).parameters():
        parameter.normal_(0.0, 0.15, generator=generator)
    return target


# Running the graph


Outputs = dict[str, NDArray[Any]]


class Caller:
    """Feeds a graph and keeps the rows it returns, as a runtime does."""

    def __init__(self, case: Case, slots: int = SLOTS) -> None:
        self.case = case
        block = case.config["block"]
        shape = (1, block["num_key_value_heads"], slots, block["head_dim"])
        names = [value.name for value in case.graph.inputs if value.name.startswith("past_")]
        self.cache = {name: np.zeros(shape, np.float32) for name in names}
        self.length = 0

    def feeds(self, count: int, size: int) -> Outputs:
        """The next ``count`` pairs in a call for ``size``."""
        rows = slice(self.length, self.length + count)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :count] = self.case.tokens[rows]
        feature = np.zeros((1, size, self.case.features.shape[1]), np.float32)
        feature[0, :count] = self.case.features[rows]
        feeds = {
            "token_ids": tokens,
            "token_count": np.array([count], np.int32),
            "cache_length": np.array([self.length], np.int32),
            **self.cache,
        }
        return feeds | ({"feature": feature} if feature.shape[2] else {})

    def keep(self, outputs: Outputs, count: int) -> None:
        for name, rows in self.cache.items():
            new = outputs[name.replace("past", "new")]
            rows[:, :, self.length : self.length + count] = new[:, :, :count]
        self.length += count

    def call(self, count: int, size: int) -> Outputs:
        outputs = run(self.case.graph, self.feeds(count, size))
        self.keep(outputs, count)
        return outputs


def run(graph: DrafterGraph, feeds: Outputs) -> Outputs:
    tensors = {name: torch.from_numpy(array) for name, array in feeds.items()}
    return {name: tensor.numpy() for name, tensor in run_graph(graph, tensors).items()}


def random_counts(seed: int) -> list[int]:
    rng, left, counts = np.random.default_rng(seed), LENGTH, []
    while left:
        counts.append(min(int(rng.integers(1, CHUNK + 1)), left))
        left -= counts[-1]
    return counts


def assert_proposal(outputs: Outputs, row: int, expected: Expected, anchor: int) -> None:
    close(outputs["draft_logprobs"][row], expected.logprobs[anchor])
    np.testing.assert_array_equal(outputs["draft_ids"][row], expected.ids[anchor])


def assert_rows(outputs: Outputs, row: int, expected: Expected, first: int, count: int) -> None:
    for layer, (key, value) in enumerate(zip(expected.keys, expected.values, strict=True)):
        for name, wanted in (("key", key), ("value", value)):
            got = outputs[f"new_{name}.{layer}"][row, :, :count]
            close(got.transpose(1, 0, 2), wanted[first : first + count])


def close(got: NDArray[Any], wanted: NDArray[Any]) -> None:
    np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_graph_equals_the_dense_reference(name: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, CASES[name])
    expected = Reference(case).run()

    for counts in ([LENGTH], random_counts(len(name))):
        caller = Caller(case)
        for count in counts:
            first = caller.length
            outputs = caller.call(count, max(count, CHUNK))
            assert outputs["draft_ids"].dtype == np.int32
            assert_proposal(outputs, 0, expected, first + count - 1)
            assert_rows(outputs, 0, expected, first, count)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    case = make_case(tmp_path, {}, tied=True)

    outputs = Caller(case).call(LENGTH, LENGTH)

    assert_proposal(outputs, 0, Reference(case).run(), LENGTH - 1)


QUIRKS: dict[str, tuple[Config, Config]] = {
    "slot": ({"slot_attention": "blind"}, {"slot_attention": "causal"}),
    "feature": ({"mask_feature": "repeat"}, {"mask_feature": "zero"}),
    "scale": ({"fuse_scale": 0.5}, {"fuse_scale": 0.6}),
    "theta": ({"rope": {"theta": 1e4}}, {"rope": {"theta": 5e3}}),
    "eps": ({}, {"block": {"norm_eps": 1e-2}}),
    "activation": ({}, {"block": {"activation": "gelu"}}),
}


@pytest.mark.parametrize("quirk", QUIRKS)
def test_the_reference_notices(quirk: str, tmp_path: Path) -> None:
    """Were the sequence or the weights too tame, a wrong graph could pass."""
    base = {"fuse": "scaled-add", "features": "last", "shift": True, "mask_feature": "zero"}
    one, other = (complete(**(base | fields)) for fields in QUIRKS[quirk])
    case = make_case(tmp_path, base | QUIRKS[quirk][0])
    right = Reference(case).run().logprobs

    case.config = other
    wrong = Reference(case).run().logprobs

    assert one != other
    assert np.abs(right - wrong).max() > 100 * TOLERANCE


# What must not matter

VARIANTS = [
    "none slot causal",
    "concat-fc repeat slot causal",
    "dual-norm slot shared blind",
    "feature-only fc slot causal",
    "one slot, concat-fc",
]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("count", [1, 2, CHUNK - 1])
def test_rows_that_do_not_count_change_nothing(name: str, count: int, tmp_path: Path) -> None:
    case = make_case(tmp_path, CASES[name])
    caller = Caller(case)
    caller.call(3, CHUNK)
    feeds = caller.feeds(count, CHUNK)
    clean = run(case.graph, feeds)
    rng = np.random.default_rng(3)

    feeds["token_ids"][0, count:] = rng.integers(0, 60, CHUNK - count)
    if "feature" in feeds:
        feeds["feature"][0, count:] = 1e3 * rng.standard_normal(feeds["feature"][0, count:].shape)
    for array in caller.cache.values():
        array[:, :, caller.length :] = 1e3 * rng.standard_normal(array[0, 0, 0].shape)
    noisy = run(case.graph, feeds)

    for output, array in clean.items():
        kept = slice(None) if output.startswith("draft") else slice(count)
        close(noisy[output][:, :, kept], array[:, :, kept])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_half_full_chunk_may_reach_past_the_context(name: str, tmp_path: Path) -> None:
    """The cache is full to its last rows, and positions end with the context."""
    case = make_case(tmp_path, CASES[name])
    caller = Caller(case, slots=LENGTH + 1)
    caller.call(LENGTH - 1, LENGTH - 1)

    outputs = caller.call(1, 4 * CHUNK)

    assert_proposal(outputs, 0, Reference(case).run(), LENGTH - 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_of_a_batch_do_not_meet(name: str, tmp_path: Path) -> None:
    cases = [make_case(tmp_path / str(i), CASES[name]) for i in range(2)]
    pair = make_case(tmp_path / "pair", CASES[name])
    cases[1].tokens, cases[1].features = cases[0].tokens[::-1].copy(), -cases[0].features
    expected = [Reference(case).run() for case in cases]
    callers = [Caller(case) for case in cases]
    callers[0].call(2, CHUNK)
    counts = (4, 1)

    feeds = [caller.feeds(n, CHUNK) for caller, n in zip(callers, counts, strict=True)]
    outputs = run(pair.graph, {key: np.concatenate([f[key] for f in feeds]) for key in feeds[0]})

    for row, (caller, count) in enumerate(zip(callers, counts, strict=True)):
        assert_proposal(outputs, row, expected[row], caller.length + count - 1)
        assert_rows(outputs, row, expected[row], caller.length, count)


@pytest.mark.parametrize("counts", [[1] * LENGTH, [4, 5], [5, 1, 3]], ids=str)
def test_chunks_leave_the_cache_of_one_shot(counts: Sequence[int], tmp_path: Path) -> None:
    case = make_case(tmp_path, CASES["dual-norm slot slot causal"])
    whole, parts = Caller(case), Caller(case)
    outputs = whole.call(LENGTH, LENGTH)

    for count in counts:
        last = parts.call(count, CHUNK)

    for name, rows in whole.cache.items():
        close(parts.cache[name], rows)
    close(last["draft_logprobs"], outputs["draft_logprobs"])
    np.testing.assert_array_equal(last["draft_ids"], outputs["draft_ids"])


def test_log_probabilities_descend_and_sum_to_one(tmp_path: Path) -> None:
    case = make_case(tmp_path, CASES["few candidates"])

    logprobs = Caller(case).call(LENGTH, LENGTH)["draft_logprobs"]

    assert logprobs.shape == (1, 4, 7)
    assert (np.diff(logprobs) <= 0).all()
    np.testing.assert_allclose(np.exp(logprobs).sum(-1), 1, rtol=1e-5)


def test_log_probabilities_of_a_sure_head_stay_finite(tmp_path: Path) -> None:
    """Probabilities of most candidates are zero in fp32."""
    case = make_case(tmp_path, {"head": "own"})
    case.graph.drafter.lm_head.weight.mul_(1e3)
    case.tensors["lm_head.weight"] *= 1e3

    outputs = Caller(case).call(LENGTH, LENGTH)

    assert outputs["draft_logprobs"].min() < -200
    np.testing.assert_allclose(
        outputs["draft_logprobs"][0], Reference(case).run().logprobs[-1], rtol=1e-5, atol=1e-2
    )


def test_mask_slots_are_no_output(tmp_path: Path) -> None:
    graph = make_case(tmp_path, CASES["concat-fc slot slot causal"]).graph

    shapes = {value.name: value.shape for value in graph.outputs}

    assert shapes["draft_ids"] == ("batch", 4, CANDIDATES)
    assert all(shape[2] == "accepted" for name, shape in shapes.items() if "new" in name)
