"""Fused graphs against the standard graphs they were made of, and packed products against loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bundles import random_drafter
from graphs import weights_of
from pspec.errors import EngineError
from pspec.export.assemble import assemble_graph
from pspec.export.describe import graph_spec
from pspec.export.fuse import fuse_graph
from pspec.export.pack import pack_products, pack_scales, pack_weight
from pspec.export.weights import external_tensors, write_weights
from pspec.models.checkpoint import load_target
from pspec.models.decoder import TargetGraph
from pspec.models.drafter_config import DrafterConfig
from pspec.models.drafter_graph import DrafterGraph
from pspec.models.graph import GraphModel
from pspec.models.initial import initial_config
from pspec.runtime.manifest import Role
from pspec.runtime.probe import FILLINGS, Feeds, probe_feeds
from tiny import VOCAB_SIZE, make_hf
from traces import trace_stages_once

Array = NDArray[Any]
Outputs = dict[str, Array]
CONTEXT = 40
SPARE = 24
"""Rows of a cache behind the context, for those of one more call."""
LAYERS = 2

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "llama, biases, one group": {
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
    "llama, a head a group, gelu": {
        "head_dim": 32,
        "num_key_value_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "llama of 8": {"head_dim": 8, "num_key_value_heads": 4, "attention_bias": True},
    "qwen3": {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3 of 24": {"family": "qwen3", "head_dim": 24, "attention_bias": True},
}
WIDE = {"features": [1, 2], "shift": True}
DRAFTERS: dict[str, dict[str, Any]] = {
    "concat-fc": {"fuse": "concat-fc", "mask_feature": "slot", **WIDE},
    "concat-fc, blind": {
        "fuse": "concat-fc",
        "mask_feature": "repeat",
        "slot_attention": "blind",
        **WIDE,
    },
    "dual-norm": {"fuse": "dual-norm", "mask_feature": "shared", "num_layers": 2, **WIDE},
    "dual-norm, blind, no norms": {
        "fuse": "dual-norm",
        "mask_feature": "zero",
        "slot_attention": "blind",
        "input_norm": False,
        "final_norm": False,
        **WIDE,
    },
    "scaled-add, no norm": {
        "fuse": "scaled-add",
        "fuse_scale": 0.3,
        "mask_feature": "repeat",
        "input_norm": False,
        "mask_embedding": "shared",
        **WIDE,
    },
    "feature-only": {"fuse": "feature-only", "mask_feature": "none", **WIDE},
    "none, blind, few tokens": {
        "fuse": "none",
        "features": "none",
        "mask_feature": "none",
        "shift": False,
        "slot_attention": "blind",
        "head": "own",
        "draft_vocab_size": 60,
    },
    "one slot": {"slots": 1, "fuse": "concat-fc", "mask_feature": "slot", **WIDE},
}


@dataclass(frozen=True)
class Pair:
    """A standard graph and the fused one, both symbolic, weights inside."""

    role: Role
    standard: ir.Model
    fused: ir.Model
    layers: int
    sizes: tuple[dict[str, int], ...]


def symbolic(model: GraphModel, folder: Path, role: Role) -> ir.Model:
    stored = write_weights(sorted(weights_of([model]).items()), folder)
    tensors = external_tensors(stored, folder)
    return assemble_graph(model, trace_stages_once(model), tensors, {}, role)


def make_pair(model: GraphModel, folder: Path, role: Role, layers: int) -> Pair:
    graph = symbolic(model, folder, role)
    counts = (1, 5, 12)
    sizes = tuple(
        {"batch": 1, "slots": CONTEXT}
        | ({"nodes": n, "rows": min(n, 3)} if role == "target" else {"accepted": n})
        for n in counts
    )
    return Pair(role, graph, fuse_graph(graph, CONTEXT + SPARE), layers, sizes)


@cache
def target_decoder(name: str, folder: Path) -> Any:
    fields = dict(TARGETS[name])
    _, target = make_hf(fields.pop("family", "llama"), folder / "target", **fields)
    return load_target(str(target)).decoder


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("target")
    decoder = target_decoder(request.param, folder)
    model = TargetGraph(decoder, positions=CONTEXT, features=(1, 2))
    return make_pair(model, folder, "target", LAYERS)


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("drafter")
    decoder = target_decoder("llama", folder)
    config = drafter_config(decoder, DRAFTERS[request.param])
    model = DrafterGraph(random_drafter(config), decoder, positions=CONTEXT)
    return make_pair(model, folder, "drafter", config.num_layers)


def drafter_config(decoder: Any, fields: Mapping[str, Any]) -> DrafterConfig:
    base = msgspec.to_builtins(initial_config(decoder, slots=4)) | fields
    return msgspec.convert(base, DrafterConfig)


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.tensor(
                tensor.numpy().copy(), dtype=tensor.dtype, name=value.name
            )
    data = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(opened: onnxruntime.InferenceSession, feeds: Feeds) -> Outputs:
    names = [value.name for value in opened.get_outputs()]
    given = {value.name: feeds[value.name] for value in opened.get_inputs()}
    return dict(zip(names, opened.run(names, given), strict=True))


def probes(pair: Pair) -> list[Feeds]:
    """Trees and pairs over caches filled in part and up to the last row."""
    whole = graph_spec("symbolic", pair.role, {}, pair.standard)
    found = []
    for sizes in pair.sizes:
        inputs = tuple(
            msgspec.structs.replace(
                spec, shape=tuple(sizes.get(str(dim), dim) for dim in spec.shape)
            )
            for spec in whole.inputs
        )
        graph = msgspec.structs.replace(whole, file=repr(sizes), sizes=sizes, inputs=inputs)
        found += [probe_feeds(graph, VOCAB_SIZE, filling) for filling in FILLINGS]
    last = dict(found[-1])  # a padded call whose rows end behind the context
    last["cache_length"] = np.array([CONTEXT - 2], np.int32)
    if pair.role == "drafter":
        last["token_count"] = np.array([2], np.int32)
    else:
        last["position_ids"] = np.minimum(last["position_ids"], CONTEXT - 1)
        last["tree_mask"] = np.tri(12, dtype=np.bool_)[None]
    return [*found, last]


def widened(feeds: Feeds) -> Feeds:
    """The cache with the rows that a call writes behind it; noise, which nothing may see."""
    rng = np.random.default_rng(0)
    wide = dict(feeds)
    for name, past in feeds.items():
        if name.startswith("past_"):
            batch, heads, _, size = past.shape
            more = 1e3 * rng.standard_normal((batch, heads, SPARE, size), dtype=np.float32)
            wide[name] = np.concatenate([past, more], axis=2)
    return wide


def assert_same(pair: Pair) -> None:
    standard, fused = session(pair.standard), session(pair.fused)
    for feeds in probes(pair):
        want, have = run(standard, feeds), run(fused, widened(feeds))
        start, count = int(feeds["cache_length"][0]), feeds["token_ids"].shape[1]
        kept = count if pair.role == "target" else int(feeds["token_count"][0])
        news = {name for name in want if name.startswith("new_")}
        assert {name.replace("new_", "present_") for name in news} == have.keys() - want.keys()
        for name, wanted in want.items():
            got = have.get(name)
            if name in news:
                present = have[name.replace("new_", "present_")]
                past = feeds[name.replace("new_", "past_")]
                np.testing.assert_array_equal(present[:, :, :start], past[:, :, :start])
                got, wanted = present[:, :, start : start + kept], wanted[:, :, :kept]
            elif pair.role == "target" and kept < count:
                continue
            assert got is not None
            if wanted.dtype.kind == "f":
                scale = max(1.0, float(np.abs(wanted).max()))
                np.testing.assert_allclose(got / scale, wanted / scale, atol=1e-4, err_msg=name)
            else:
                np.testing.assert_array_equal(got, wanted, err_msg=name)


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def assert_fused(pair: Pair) -> None:
    counts, before = operators(pair.fused), operators(pair.standard)
    assert counts["GroupQueryAttention"] == pair.layers
    # A drafter's own softmax, over its vocabulary, stays.
    assert before["Softmax"] - counts["Softmax"] == pair.layers
    assert counts["Softmax"] == (1 if pair.role == "drafter" else 0)
    assert counts["MatMul"] == before["MatMul"] - 4 * pair.layers
    assert counts["ReduceMean"] == counts["Sqrt"] == 0
    norms = counts["SimplifiedLayerNormalization"] + counts["SkipSimplifiedLayerNormalization"]
    assert norms == before["Sqrt"]
    assert counts["QuickGelu"] == before["Sigmoid"]
    assert counts["Where"] <= 1 + before["Where"] - pair.layers
    names = [value.name for value in pair.fused.graph.inputs]
    assert names == [value.name for value in pair.standard.graph.inputs]
    assert {node.domain for node in pair.fused.graph} == {"", "com.microsoft"}
    size = next(v for v in pair.fused.graph.inputs if v.name == "past_key.0").shape[3]  # type: ignore[index]
    attention = next(node for node in pair.fused.graph if node.op_type == "GroupQueryAttention")
    assert attention.attributes["do_rotary"].as_int() == (size % 16 == 0)


def test_a_fused_target_computes_the_same(target: Pair) -> None:
    assert_same(target)


def test_a_fused_target_has_the_fused_operators(target: Pair) -> None:
    assert_fused(target)


def test_a_fused_drafter_computes_the_same(drafter: Pair) -> None:
    assert_same(drafter)


def test_a_fused_drafter_has_the_fused_operators(drafter: Pair) -> None:
    assert_fused(drafter)


def test_the_standard_graph_stays_as_it_is(target: Pair) -> None:
    before = ir.to_proto(target.standard).SerializeToString()

    fuse_graph(target.standard, CONTEXT + SPARE)

    assert ir.to_proto(target.standard).SerializeToString() == before


# Rows of a batch


def test_single_rows_of_a_batch_do_not_meet(target: Pair) -> None:
    """One new row each over caches of different length."""
    fused = session(target.fused)
    singles = [feeds for feeds in probes(target) if feeds["token_ids"].shape[1] == 1]
    lengths = [0, 7, CONTEXT - 1]
    rows = []
    for number, length in enumerate(lengths):
        feeds = dict(widened(singles[number % 2]))
        feeds["token_ids"] = feeds["token_ids"] * 0 + 10 * (number + 1)
        feeds["cache_length"] = np.array([length], np.int32)
        feeds["position_ids"] = np.array([[length]], np.int32)
        rows.append(feeds)

    together = run(fused, {name: np.concatenate([row[name] for row in rows]) for name in rows[0]})

    for number, feeds in enumerate(rows):
        alone = run(fused, feeds)
        for name, wanted in alone.items():
            got = together[name][number : number + 1]
            if name.startswith("present_"):
                got, wanted = (each[:, :, : lengths[number] + 1] for each in (got, wanted))
            np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=1e-4, err_msg=name)


# What cannot be fused


def llama_graph(folder: Path, head_dim: int = 16) -> ir.Model:
    _, target = make_hf("llama", folder / "target", head_dim=head_dim)
    model = TargetGraph(load_target(str(target)).decoder, positions=CONTEXT, features=(1, 2))
    return symbolic(model, folder, "target")


def node_of(model: ir.Model, op_type: str, layer: int) -> ir.Node:
    prefix = f"layers.{layer}/"
    return next(n for n in model.graph if n.op_type == op_type and str(n.name).startswith(prefix))


def other_mask(model: ir.Model) -> None:
    """The mask is added to the scores, not chosen by."""
    node = node_of(model, "Where", 1)
    node.replace_input_with(1, node.inputs[2])
    node.op_type = "Where"
    node.replace_input_with(0, node_of(model, "Where", 0).inputs[0])
    softmax = node_of(model, "Softmax", 1)
    extra = ir.node("Mul", [softmax.inputs[0], softmax.inputs[0]], name="layers.1/planted")
    extra.outputs[0].name = "planted"
    model.graph.insert_before(softmax, extra)
    softmax.replace_input_with(0, extra.outputs[0])


def other_axis(model: ir.Model) -> None:
    node_of(model, "Softmax", 1).attributes["axis"] = ir.AttrInt64("axis", 2)


def capped_scores(model: ir.Model) -> None:
    """A softcap, as other families have it."""
    softmax = node_of(model, "Softmax", 1)
    cap = ir.node("Tanh", [softmax.inputs[0]], name="layers.1/cap")
    cap.outputs[0].name = "capped"
    model.graph.insert_before(softmax, cap)
    softmax.replace_input_with(0, cap.outputs[0])


@pytest.mark.parametrize("change", [other_mask, other_axis, capped_scores])
def test_an_attention_of_another_form_is_refused_by_name(change: Any, tmp_path: Path) -> None:
    model = llama_graph(tmp_path)
    change(model)

    with pytest.raises(EngineError, match=r"graph target: .*layers\.1/.*no fused form"):
        fuse_graph(model, CONTEXT)


def test_heads_that_no_fused_attention_takes_are_refused(tmp_path: Path) -> None:
    model = llama_graph(tmp_path, 12)

    with pytest.raises(EngineError, match=r"heads of 12 .*--engine standard"):
        fuse_graph(model, CONTEXT)


# Packed products


def product(integers: Array, scales: Array, block: int, bits: int, level: int) -> Any:
    """``x [R, K] -> y [R, N]`` over a weight as a bundle stores it, packed."""
    inputs, outputs = integers.shape
    kind = TensorProto.INT4 if bits == 4 else TensorProto.INT8
    weight = helper.make_tensor("w", kind, integers.shape, integers.reshape(-1).tolist())
    scale = helper.make_tensor("s", TensorProto.FLOAT, scales.shape, scales.reshape(-1).tolist())
    attributes: dict[str, Any] = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], **attributes),
        helper.make_node("MatMul", ["x", "d"], ["y"], name="layers.0/product"),
    ]
    ends = [("x", [None, inputs]), ("y", [None, outputs])]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in ends]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [weight, scale])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    pack_products(model, level)
    assert [node.op_type for node in model.graph] == ["MatMulNBits"]
    return session(model)


@pytest.mark.parametrize(
    ("inputs", "outputs", "block", "bits"),
    [
        (64, 5, 32, 4),
        (96, 7, 32, 4),
        (128, 3, 64, 4),
        (256, 9, 128, 4),
        (64, 6, 0, 8),
        (96, 5, 0, 8),
        (80, 1, 0, 8),
        (7, 4, 0, 8),
    ],
)
def test_a_packed_product_is_the_product(inputs: int, outputs: int, block: int, bits: int) -> None:
    rng = np.random.default_rng(inputs)
    least, largest = (-8, 7) if bits == 4 else (-127, 127)
    integers = rng.integers(least, largest + 1, (inputs, outputs)).astype(np.int8)
    shape = (inputs // block, outputs) if block else (outputs,)
    scales = np.exp(rng.uniform(-2, 2, shape)).astype(np.float32)
    x = rng.standard_normal((3, inputs)).astype(np.float32)
    wanted = np.zeros((3, outputs))
    for row in range(inputs):
        for column in range(outputs):
            scale = scales[row // block, column] if block else scales[column]
            wanted[:, column] += x[:, row].astype(np.float64) * int(integers[row, column]) * scale

    exact, rounded = (
        product(integers, scales, block, bits, level).run(None, {"x": x})[0] for level in (1, 4)
    )

    np.testing.assert_allclose(exact, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    np.testing.assert_allclose(rounded, wanted, rtol=0.1, atol=0.05 * np.abs(wanted).max())


def test_the_packed_layout() -> None:
    """Blocks of a column after each other, the first of two integers in the low half, zero at 8."""
    integers = np.arange(-8, 8, dtype=np.int8)[:, None].repeat(2, 1) * np.array([1, -1], np.int8)
    integers = integers.clip(-8, 7)

    packed = pack_weight(integers, 8, 4)

    assert packed.shape == (2, 2, 4)
    assert packed[0, 0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert packed[0, 1].tolist() == [0x98, 0xBA, 0xDC, 0xFE]
    assert packed[1, 0].tolist() == [0xFF, 0xDE, 0xBC, 0x9A]
    assert pack_weight(integers, 12, 8).shape == (2, 2, 12)
    assert (pack_weight(integers, 12, 8)[:, 1, 4:] == 128).all()
    assert pack_scales(np.array([[1, 2], [3, 4]], np.float32), 16, 8).tolist() == [1, 3, 2, 4]
    assert pack_scales(np.array([1, 2], np.float32), 20, 8).tolist() == [1, 1, 1, 2, 2, 2]
