from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from graphs import (
    ACCEPTED,
    BUCKETS,
    CHUNK,
    NODES,
    Graph,
    Traced,
    copy_with_weights,
    save_graph,
    weights_of,
)
from pspec.errors import ConfigError
from pspec.export.assemble import assemble_graph
from pspec.export.lint import ALLOWED_OPS, check_graph, lint_graph
from pspec.export.parity import compare_graph, make_feeds, passed, torch_outputs
from pspec.export.trace import TracedStage, freeze_stage, trace_stages
from pspec.export.weights import WEIGHT_FILE, external_tensors, unique_bytes, write_weights
from pspec.models import decoder, drafter_graph
from pspec.models.graph import Stage, Value, run_graph
from pspec.models.layers import MASKED, Linear, RMSNorm, attend
from tiny import VOCAB_SIZE

Arrays = dict[str, NDArray[Any]]
TOLERANCE = 1e-4
KINDS = ("llama", "qwen3", "pair")
INLINE_LIMIT = 1024
"""Bytes of a constant that may lie inside an .onnx file."""


@pytest.fixture(params=KINDS)
def traced(request: pytest.FixtureRequest) -> Traced:
    """Each kind of model pair in turn."""
    found: Traced = request.getfixturevalue(f"{request.param}_graphs")
    return found


def protos(traced: Traced) -> Iterator[tuple[Graph, onnx.ModelProto]]:
    for graph in traced.graphs:
        yield graph, onnx.load(graph.path, load_external_data=False)


def session(path: Path, level: str = "ALL") -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, f"ORT_{'ENABLE' if level == 'ALL' else 'DISABLE'}_ALL"
    )
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(opened: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
    names = [value.name for value in opened.get_outputs()]
    known = {value.name for value in opened.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in known}
    return dict(zip(names, opened.run(names, given), strict=True))


def close(got: Arrays, wanted: Arrays) -> None:
    for name, array in wanted.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(got[name], array, TOLERANCE, TOLERANCE, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], array, err_msg=name)


# What the files hold


def test_every_shape_of_the_plan_is_there(traced: Traced) -> None:
    batch = traced.graphs[0].sizes["batch"]
    counts = {(graph.role, *graph.sizes.values()) for graph in traced.graphs}

    assert counts == {
        *(
            ("target", batch, n, s, r)
            for s in BUCKETS
            for n, r in ((1, 1), (NODES, NODES), (CHUNK, 1))
        ),
        *(("drafter", batch, a, s) for s in BUCKETS for a in (5, CHUNK)),
    }


def test_every_value_has_a_static_shape(traced: Traced) -> None:
    for graph, model in protos(traced):
        values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
        known = {value.name for value in values}
        assert known >= {name for node in model.graph.node for name in node.output}
        for value in values:
            dims = value.type.tensor_type.shape.dim
            sizes = [dim.dim_value for dim in dims]
            assert all(size > 0 for size in sizes), (graph.path.name, value.name, sizes)
            assert not any(dim.dim_param for dim in dims), (graph.path.name, value.name)


def test_shapes_are_those_that_onnx_infers(traced: Traced) -> None:
    """A stored shape is a claim; this infers every one anew."""
    for _, model in protos(traced):
        claimed = {value.name: value.type for value in model.graph.value_info}
        claimed |= {value.name: value.type for value in model.graph.output}
        del model.graph.value_info[:]
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        assert len(inferred.graph.value_info) >= len(model.graph.node) - len(model.graph.output)
        for value in inferred.graph.value_info:
            assert value.type == claimed[value.name], value.name


def test_graphs_pass_the_checker_and_the_lint(traced: Traced) -> None:
    for graph in traced.graphs:
        onnx.checker.check_model(str(graph.path), full_check=True)
        assert lint_graph(ir.load(graph.path)) == []


def test_opset_18_ir_8_and_nothing_but_standard_operators(traced: Traced) -> None:
    for _, model in protos(traced):
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
        assert model.ir_version == 8
        assert not model.functions
        for node in model.graph.node:
            assert node.domain == ""
            assert node.op_type in ALLOWED_OPS
            assert not any(attribute.HasField("g") for attribute in node.attribute)


def test_integers_fit_32_bits(traced: Traced) -> None:
    for _, model in protos(traced):
        for value in (*model.graph.input, *model.graph.output):
            kind = value.type.tensor_type.elem_type
            assert kind in (TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT), value.name
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.INT64:
                numbers = onnx.numpy_helper.to_array(tensor)
                assert (np.abs(numbers.astype(object)) < 2**31).all(), tensor.name


def test_weights_lie_outside_and_nothing_of_this_machine_inside(traced: Traced) -> None:
    names = {tensor.name for tensor in traced.stored}
    for graph, model in protos(traced):
        external = {
            tensor.name
            for tensor in model.graph.initializer
            if tensor.data_location == TensorProto.EXTERNAL
        }
        inline = [t for t in model.graph.initializer if t.name not in external]
        assert external == names & {tensor.name for tensor in model.graph.initializer}
        assert all(len(tensor.raw_data) <= INLINE_LIMIT for tensor in inline)
        data = graph.path.read_bytes()
        assert len(data) < 48_000
        for trace in (str(Path.home()), str(traced.folder), ".py", "pkg.torch", "stack_trace"):
            assert trace.encode() not in data


def test_names_lead_to_the_layer(traced: Traced) -> None:
    for _, model in protos(traced):
        nodes = [node.name for node in model.graph.node]
        assert len(set(nodes)) == len(nodes)
        assert all(re.match(r"(embed|layers\.\d+|head|feature)/\w+", name) for name in nodes)


# Inputs and outputs: the tables of the module docstrings are the contract


def table(module: Any, kind: str) -> list[tuple[str, list[str], str]]:
    """Rows of the table headed ``kind``: name, shape, type."""
    text = module.__doc__
    body = text[re.search(rf"^{kind} +shape +type", text, re.MULTILINE).end() :]  # type: ignore[union-attr]
    rows = re.findall(r"^(\S+) +\[(.*?)\] +(int32|bool|float)\b *(.*)", body.split("\n\n")[0], re.M)
    found = []
    for name, dims, dtype, meaning in rows:
        twin = re.match(r"and (\S+)\.l\b", meaning)
        names = [name, *([f"{twin[1]}.l"] if twin else [])]
        found += [(each, dims.split(", "), dtype) for each in names]
    return found


def expected_io(
    traced: Traced, role: str, kind: str, letters: Mapping[str, int | str]
) -> list[tuple[str, tuple[int | str, ...], str]]:
    module = {"target": decoder, "drafter": drafter_graph}[role]
    layers = sum(name.startswith("past_key") for name in (v.name for v in inputs_of(traced, role)))
    plain, cache = [], []
    for name, dims, dtype in table(module, kind):
        shape = tuple(letters[dim] for dim in dims)
        if name.endswith(".l"):
            cache.append((name.removesuffix("l"), shape, dtype))
        elif shape[-1] != 0:  # no features
            plain.append((name, shape, dtype))
    per_layer = [(f"{n}{i}", shape, dtype) for i in range(layers) for n, shape, dtype in cache]
    return plain + per_layer


def inputs_of(traced: Traced, role: str) -> list[Value]:
    return list(traced.models[role].inputs)


def letters_of(traced: Traced, role: str, sizes: Mapping[str, int]) -> dict[str, int | str]:
    model: Any = traced.models[role]
    block = model.decoder.config.block if role == "target" else model.config.block
    letters: dict[str, int | str] = {
        "B": sizes.get("batch", "batch"),
        "Hkv": block.num_key_value_heads,
        "D": block.head_dim,
        "S": sizes.get("slots", "slots"),
        "V": VOCAB_SIZE,
        "N": sizes.get("nodes", "nodes"),
        "R": sizes.get("rows", "rows"),
        "A": sizes.get("accepted", "accepted"),
    }
    letters["F"] = model.feature_size if role == "target" else model.config.feature_size
    if role == "drafter":
        letters |= {"K": model.config.slots, "m": model.candidates}
    return letters


def io_of(values: Any) -> list[tuple[str, tuple[int | str, ...], str]]:
    types = {TensorProto.FLOAT: "float", TensorProto.INT32: "int32", TensorProto.BOOL: "bool"}
    return [
        (
            value.name,
            tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
            types[value.type.tensor_type.elem_type],
        )
        for value in values
    ]


def test_tables_are_parsed() -> None:
    names = [name for name, _, _ in table(decoder, "input")]

    assert names[0] == "token_ids"
    assert names[-2:] == ["past_key.l", "past_value.l"]
    assert table(drafter_graph, "output")[0] == ("draft_ids", ["B", "K", "m"], "int32")


def test_inputs_and_outputs_are_those_of_the_tables(traced: Traced) -> None:
    for graph, model in protos(traced):
        letters = letters_of(traced, graph.role, graph.sizes)
        assert io_of(model.graph.input) == expected_io(traced, graph.role, "input", letters)
        assert io_of(model.graph.output) == expected_io(traced, graph.role, "output", letters)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_symbolic_graph_names_its_sizes(role: str, traced: Traced, tmp_path: Path) -> None:
    """Sizes of 1 while tracing would merge axes; here every axis keeps a name of its own."""
    path = tmp_path / "symbolic.onnx"
    ir.save(traced.freeze(role, {}), path)
    model = onnx.load(path, load_external_data=False)

    letters = letters_of(traced, role, {})

    assert io_of(model.graph.input) == expected_io(traced, role, "input", letters)
    assert io_of(model.graph.output) == expected_io(traced, role, "output", letters)


# Growth


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_files_grow_with_the_context_not_with_its_square(role: str, llama_graphs: Traced) -> None:
    count = {"nodes": 8, "rows": 8} if role == "target" else {"accepted": 8}

    def size(slots: int) -> int:
        graph = llama_graphs.freeze(role, {"batch": 1, "slots": slots, **count})
        assert lint_graph(graph) == []
        return int(ir.to_proto(graph).ByteSize())

    small, middle, large, huge = (size(slots) for slots in (64, 512, 4096, 131072))

    assert large - middle <= 1.1 * 8 * (middle - small)
    assert huge - small <= 8 * 131072


# The lint


def planted(traced: Traced) -> ir.Model:
    return traced.freeze("target", {"batch": 1, "nodes": 2, "slots": 8, "rows": 1})


def append(model: ir.Model, op: str, domain: str = "", **kind: Any) -> ir.Node:
    """A node between the first layer and the second."""
    source = next(node.outputs[0] for node in model.graph if node.name == "layers.1/node_mean")
    node = ir.node(op, [source], domain=domain, name=f"layers.1/{op}_9")
    node.outputs[0].name = "planted"
    node.outputs[0].shape = kind.get("shape", ir.Shape([1, 2, 1]))
    node.outputs[0].dtype = kind.get("dtype", ir.DataType.FLOAT)
    model.graph.insert_after(source.producer(), node)  # type: ignore[arg-type]
    return node


def constant(model: ir.Model, numbers: list[int]) -> None:
    tensor = ir.tensor(np.array(numbers, np.int64), name="layers.1/ends")
    kind = ir.TensorType(tensor.dtype)
    value = ir.Value(
        name=tensor.name, shape=ir.Shape([len(numbers)]), type=kind, const_value=tensor
    )
    model.graph.register_initializer(value)


VIOLATIONS: dict[str, tuple[Any, str, str]] = {
    "operator": (
        lambda m: append(m, "NonZero"),
        "layers.1/NonZero_9",
        "operator NonZero is not in the portable set",
    ),
    "control flow": (lambda m: append(m, "Loop"), "layers.1/Loop_9", "operator Loop"),
    "domain": (
        lambda m: append(m, "SkipLayerNormalization", "com.microsoft"),
        "layers.1/SkipLayerNormalization_9",
        "operator com.microsoft.SkipLayerNormalization is not standard",
    ),
    "standard name, custom domain": (
        lambda m: append(m, "MatMul", "com.microsoft"),
        "layers.1/MatMul_9",
        "operator com.microsoft.MatMul is not standard",
    ),
    "symbolic dim": (
        lambda m: append(m, "Identity", shape=ir.Shape([1, "rest"])),
        "layers.1/Identity_9",
        "planted has shape",
    ),
    "no shape": (
        lambda m: append(m, "Identity", shape=None),
        "layers.1/Identity_9",
        "planted has shape None",
    ),
    "double": (
        lambda m: append(m, "Cast", dtype=ir.DataType.DOUBLE),
        "layers.1/Cast_9",
        "planted is DOUBLE",
    ),
    "symbolic input": (
        lambda m: setattr(m.graph.inputs[0], "shape", ir.Shape([1, "nodes"])),
        "token_ids",
        "expected numbers only",
    ),
    "int64 input": (
        lambda m: setattr(m.graph.inputs[0], "dtype", ir.DataType.INT64),
        "token_ids",
        "INT64 at the boundary",
    ),
    "int64 output": (
        lambda m: setattr(m.graph.outputs[0], "dtype", ir.DataType.INT64),
        "next_token",
        "INT64 at the boundary",
    ),
    "large constant": (
        lambda m: constant(m, [0, 2**31]),
        "layers.1/ends",
        "does not fit 32 bits",
    ),
    "least int64": (
        lambda m: constant(m, [-(2**63)]),
        "layers.1/ends",
        "does not fit 32 bits",
    ),
    "initialiser without a value": (
        lambda m: setattr(m.graph.initializers["norm.weight"], "const_value", None),
        "norm.weight",
        "without a value",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_the_lint_names_a_planted_violation(name: str, llama_graphs: Traced) -> None:
    plant, where, reason = VIOLATIONS[name]
    model = planted(llama_graphs)
    assert lint_graph(model) == []

    plant(model)

    findings = lint_graph(model)
    assert any(f.where == where and reason in f.reason for f in findings), findings
    with pytest.raises(ConfigError, match=re.escape(f"graph some.onnx: {where}: ")) as caught:
        check_graph(model, "some.onnx")
    assert "\n" not in str(caught.value)


def test_the_largest_allowed_constant_passes(llama_graphs: Traced) -> None:
    model = planted(llama_graphs)

    constant(model, [2**31 - 1, 1 - 2**31])

    assert lint_graph(model) == []


def test_open_slices_end_within_32_bits() -> None:
    """Traces say INT64_MAX for "to the end", and INT64_MIN where a slice runs backwards."""
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["": 18]>
        g (float[1, nodes, 4] x) => (float[1, nodes, 4] y)
        <int64[1] begin = {2}, int64[1] end = {9223372036854775807}, int64[1] axis = {2},
         int64[1] last = {9223372036854775807}, int64[1] first = {-9223372036854775808},
         int64[1] back = {-1}>
        {
            tail = Slice (x, begin, end, axis)
            turned = Slice (tail, last, first, axis, back)
            y = Concat <axis = 2> (tail, turned)
        }"""
    )

    frozen = freeze_stage(TracedStage("slices", model, ()), {"nodes": 2})

    numbers = [value.const_value.numpy().tolist() for value in frozen.graph.initializers.values()]  # type: ignore[union-attr]
    assert [2**31 - 1] in numbers
    assert [1 - 2**31] in numbers
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 4)
    outputs: Any = ReferenceEvaluator(ir.to_proto(frozen)).run(None, {"x": x})
    np.testing.assert_array_equal(outputs[0][0, 0], [2, 3, 3, 2])


# The numbers


def test_optimised_plain_and_torch_agree(traced: Traced) -> None:
    for graph in traced.graphs:
        model = traced.models[graph.role]
        sessions = [session(graph.path), session(graph.path, "NONE")]
        for kind in ("fixed", "random"):
            feeds = make_feeds(model, graph.sizes, kind, VOCAB_SIZE)
            wanted = torch_outputs(model, feeds)
            for opened in sessions:
                close(run(opened, feeds), wanted)


def test_symbolic_graphs_agree_at_a_shape_of_their_own(traced: Traced) -> None:
    own = {
        "target": {"batch": 2, "nodes": 9, "slots": 31, "rows": 3},
        "drafter": {"batch": 3, "accepted": 3, "slots": 31},
    }
    for role, sizes in own.items():
        graph = save_graph(traced, role, {})
        feeds = make_feeds(traced.models[role], sizes, "random", VOCAB_SIZE)

        got = run(session(graph.path), feeds)

        close(got, torch_outputs(traced.models[role], feeds))


def target_feeds(
    traced: Traced, graph: Graph, tokens: list[int], start: int, cache: Arrays
) -> Arrays:
    """A chain of tokens after ``start`` cached rows; the nodes after them are padding."""
    count, size = len(tokens), graph.sizes["nodes"]
    chain = np.eye(size, dtype=bool)
    chain[:count, :count] |= np.tri(count, dtype=bool)
    position = start + np.minimum(np.arange(size), count - 1)
    rows = graph.sizes["rows"]
    wanted = np.arange(rows) if rows > 1 else np.array([count - 1])
    slots = {name: array[:, :, : graph.sizes["slots"]] for name, array in cache.items()}
    return {
        "token_ids": np.array([tokens + [0] * (size - count)], np.int32),
        "position_ids": position[None].astype(np.int32),
        "tree_mask": chain[None],
        "cache_length": np.array([start], np.int32),
        "logit_rows": wanted[None].astype(np.int32),
        **slots,
    }


def empty_cache(traced: Traced, role: str = "target") -> Arrays:
    model: Any = traced.models[role]
    block = traced.decoder.config.block if role == "target" else model.config.block
    shape = (1, block.num_key_value_heads, BUCKETS[-1], block.head_dim)
    names = [value.name for value in model.inputs if value.name.startswith("past_")]
    return {name: np.zeros(shape, np.float32) for name in names}


def keep(cache: Arrays, outputs: Arrays, start: int, count: int) -> None:
    for name, rows in cache.items():
        rows[:, :, start : start + count] = outputs[name.replace("past", "new")][:, :, :count]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_verified_rows_see_the_cache_as_a_full_forward_does(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """A causal mask anchored to the block instead of the cache is right only in an empty cache."""
    traced: Traced = request.getfixturevalue(f"{kind}_graphs")
    tokens = np.random.default_rng(4).integers(3, VOCAB_SIZE, 34).tolist()
    with torch.inference_mode():
        wanted = traced.hf_model(torch.tensor([tokens])).logits[0].numpy()
    prefill = traced.graph("target", nodes=CHUNK, slots=BUCKETS[1])
    verify = traced.graph("target", nodes=NODES, slots=BUCKETS[1])
    cache = empty_cache(traced)

    for first in range(0, 30, CHUNK):
        chunk = tokens[first : min(first + CHUNK, 30)]
        outputs = run(session(prefill.path), target_feeds(traced, prefill, chunk, first, cache))
        keep(cache, outputs, first, len(chunk))
    np.testing.assert_allclose(outputs["logits"][0, 0], wanted[29], TOLERANCE, TOLERANCE)
    outputs = run(session(verify.path), target_feeds(traced, verify, tokens[30:], 30, cache))

    np.testing.assert_allclose(outputs["logits"][0, :4], wanted[30:], TOLERANCE, TOLERANCE)
    np.testing.assert_array_equal(outputs["next_token"][0, :4], wanted[30:].argmax(-1))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tree_branches_do_not_see_each_other(kind: str, request: pytest.FixtureRequest) -> None:
    traced: Traced = request.getfixturevalue(f"{kind}_graphs")
    graph = traced.graph("target", nodes=NODES, slots=BUCKETS[0])
    prompt, paths = [5, 9, 11], [[20, 21, 22], [20, 30], [20, 21, 40]]
    cache = empty_cache(traced)
    outputs = run(session(graph.path), target_feeds(traced, graph, prompt, 0, cache))
    keep(cache, outputs, 0, 3)
    feeds = target_feeds(traced, graph, [20, 21, 22, 30, 40, 0], 3, cache)
    parents = [0, 0, 1, 0, 1, 5]
    mask = np.eye(NODES, dtype=bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent]
    feeds["tree_mask"][0] = mask
    feeds["position_ids"][0] = 3 + np.array([0, 1, 2, 1, 2, 0])

    logits = run(session(graph.path), feeds)["logits"][0]

    for path, node in zip(paths, (2, 3, 4), strict=True):
        with torch.inference_mode():
            wanted = traced.hf_model(torch.tensor([prompt + path])).logits[0, -1].numpy()
        np.testing.assert_allclose(logits[node], wanted, TOLERANCE, TOLERANCE)


def test_empty_cache_and_padding_stay_finite(traced: Traced) -> None:
    for graph in traced.graphs:
        model = traced.models[graph.role]
        feeds = make_feeds(model, graph.sizes, "random", VOCAB_SIZE)
        feeds["cache_length"][:] = 0
        for name in feeds:
            if name.startswith("past_"):
                feeds[name][:] = 0
        if graph.role == "target":
            feeds["tree_mask"][:] = np.eye(graph.sizes["nodes"], dtype=bool)
            feeds["position_ids"][:] = 0
        else:
            feeds["token_count"][:] = 1
        for level in ("ALL", "NONE"):
            for name, array in run(session(graph.path, level), feeds).items():
                assert np.isfinite(array).all(), (graph.path.name, name)


def test_padding_changes_no_row_before_it(llama_graphs: Traced) -> None:
    verify = llama_graphs.graph("target", nodes=NODES, slots=BUCKETS[0])
    prefill = llama_graphs.graph("target", nodes=CHUNK, slots=BUCKETS[0])
    cache, tokens = empty_cache(llama_graphs), [7, 8, 9, 10, 11, 12]

    short = run(session(verify.path), target_feeds(llama_graphs, verify, tokens, 0, cache))
    long = run(session(prefill.path), target_feeds(llama_graphs, prefill, tokens, 0, cache))

    close({"logits": long["logits"][:, 0]}, {"logits": short["logits"][:, -1]})
    for name in ("feature", "new_key.1", "new_value.1"):
        count = (slice(None), slice(6)) if name == "feature" else (slice(None),) * 2 + (slice(6),)
        close({name: long[name][count]}, {name: short[name]})


# Ties


def test_next_token_is_the_lowest_id_among_equals(llama_graphs: Traced, tmp_path: Path) -> None:
    graph = llama_graphs.graph("target", nodes=NODES, slots=BUCKETS[0])
    feeds = make_feeds(llama_graphs.models["target"], graph.sizes, "random", VOCAB_SIZE)
    head = weights_of(llama_graphs.models.values())["lm_head.weight"].clone()
    wanted = run(session(graph.path), feeds)["next_token"][0]
    best = int(wanted[0])
    twins = [min(best, 3), 301] if best > 150 else [best, 301]
    head[:, twins] = head[:, [best]]

    path = copy_with_weights(llama_graphs, tmp_path / "tie", graph, {"lm_head.weight": head})

    for level in ("ALL", "NONE"):
        outputs = run(session(path, level), feeds)
        logits = outputs["logits"][0, 0]
        equal = np.flatnonzero(logits == logits.max())
        assert len(equal) > 1
        assert outputs["next_token"][0, 0] == equal[0] == twins[0]


# Half precision (TensorRT and GPUs compute it as such; ONNX Runtime's CPU widens it)


class NarrowNorm(nn.Module):
    """An RMS norm as it must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * self.weight


class HalfGraph:
    """One module over ``x [1, N, 64]`` in half precision."""

    dims = ("nodes",)

    def __init__(self, module: nn.Module) -> None:
        self.inputs = [Value("x", (1, "nodes", 64), "float16")]
        self.outputs = [Value("y", (1, "nodes", 64), "float16")]
        weights = {name: name for name in module.state_dict()}
        self.stages = [Stage("half", "half", module, ("x",), ("y",), weights)]

    def value(self, name: str) -> Value:
        return next(value for value in (*self.inputs, *self.outputs) if value.name == name)


def reference_run(module: nn.Module, folder: Path, x: NDArray[np.float16]) -> NDArray[Any]:
    """Trace in half precision, freeze, and compute each operator in its own type."""
    model = HalfGraph(module)
    stored = write_weights(sorted(module.state_dict().items()), folder)
    tensors = external_tensors(stored, folder)
    sizes = {"nodes": x.shape[1]}
    graph = assemble_graph(model, trace_stages(model), tensors, sizes, "half")
    assert lint_graph(graph) == []
    ir.save(graph, folder / "half.onnx")
    evaluator = ReferenceEvaluator(onnx.load(folder / "half.onnx"))
    (y,) = evaluator.run(None, {"x": x})
    return np.asarray(y)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the narrow norm's
def test_half_precision_norm_survives_large_states(tmp_path: Path) -> None:
    norm = RMSNorm(64, 1e-8).requires_grad_(False)
    norm.weight.fill_(1.0)
    x = np.full((1, 2, 64), 300, np.float16)  # 300 squared is more than a half can hold

    for name, module in (("narrow", NarrowNorm().requires_grad_(False)), ("ours", norm.half())):
        (tmp_path / name).mkdir()
        y = reference_run(module, tmp_path / name, x)
        assert y.dtype == np.float16
        np.testing.assert_array_equal(y, 1.0 if name == "ours" else 0.0)


def test_half_precision_norm_survives_small_states(tmp_path: Path) -> None:
    """An epsilon of 1e-8 is 0 in half precision, and so is the square of 1e-5."""
    norm = RMSNorm(64, 1e-8).half().requires_grad_(False)
    norm.weight.fill_(1.0)

    y = reference_run(norm, tmp_path, np.full((1, 1, 64), 1e-4, np.float16))

    np.testing.assert_allclose(y, 1e-4 / np.sqrt(2e-8), rtol=5e-3)


def test_half_precision_linear_keeps_its_type(tmp_path: Path) -> None:
    linear = Linear(64, 64, bias=True).half().requires_grad_(False)
    for parameter in linear.parameters():
        parameter.fill_(0.5)

    y = reference_run(linear, tmp_path, np.ones((1, 3, 64), np.float16))

    assert y.dtype == np.float16
    np.testing.assert_array_equal(y, 32.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_invisible_keys_have_no_weight_and_masks_are_finite(dtype: torch.dtype) -> None:
    query = torch.full((1, 2, 1, 4), 60.0, dtype=dtype)
    key = torch.full((1, 1, 3, 4), 60.0, dtype=dtype)
    value = torch.full((1, 1, 3, 4), 1e4, dtype=dtype)
    own = torch.ones(1, 1, 1, 4, dtype=dtype)
    visible = torch.tensor([False, False, False, True]).expand(1, 1, 2, 4)

    mixed = attend(query, key, value, own, own, visible)

    assert np.isfinite(MASKED)
    assert mixed.dtype == dtype
    torch.testing.assert_close(mixed, torch.ones(1, 1, 8, dtype=dtype))
    unseen = attend(query, key, value, own, own, torch.zeros_like(visible))
    assert unseen.isfinite().all()


# Weights


def test_external_data_is_the_parameters_bit_for_bit(traced: Traced) -> None:
    tensors = weights_of(traced.models.values())
    data = (traced.folder / WEIGHT_FILE).read_bytes()
    for _, model in protos(traced):
        for tensor in model.graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            where = {entry.key: entry.value for entry in tensor.external_data}
            assert where["location"] == WEIGHT_FILE
            offset, length = int(where["offset"]), int(where["length"])
            assert offset % 64 == 0
            expected = tensors[tensor.name].numpy()
            assert list(tensor.dims) == list(expected.shape)
            assert data[offset : offset + length] == expected.tobytes()


def test_the_weight_file_holds_what_is_needed_once(traced: Traced) -> None:
    tensors = weights_of(traced.models.values())
    size = (traced.folder / WEIGHT_FILE).stat().st_size
    distinct = {(str(t.dtype), t.shape, t.numpy().tobytes()) for t in tensors.values()}

    assert {tensor.name for tensor in traced.stored} == tensors.keys()
    assert unique_bytes(traced.stored) == sum(len(data) for _, _, data in distinct)
    assert size <= unique_bytes(traced.stored) + 64 * len(distinct)


def test_what_drafter_and_target_share_is_stored_once(qwen3_graphs: Traced) -> None:
    """The embedding by its name, equal rotary tables by their bytes."""
    names = [tensor.name for tensor in qwen3_graphs.stored]
    target = {t.name for t in protos_of(qwen3_graphs, "target").graph.initializer}
    drafter_names = {t.name for t in protos_of(qwen3_graphs, "drafter").graph.initializer}

    assert names.count("embed_tokens.weight") == 1
    assert "embed_tokens.weight" in target & drafter_names
    assert "lm_head.weight" not in names


def protos_of(traced: Traced, role: str) -> onnx.ModelProto:
    return next(model for graph, model in protos(traced) if graph.role == role)


def test_equal_tensors_share_an_offset_and_all_are_aligned(tmp_path: Path) -> None:
    ones = torch.ones(3, 5)
    tensors = [
        ("a", ones),
        ("b", torch.arange(7.0)),
        ("c", ones.clone()),
        ("d", ones.half()),
        ("e", torch.ones(5, 3)),
        ("f", torch.arange(6.0).reshape(2, 3).T),
        ("a", ones),
    ]

    written: list[int] = []
    stored = {tensor.name: tensor for tensor in write_weights(tensors, tmp_path, written.append)}

    assert list(stored) == ["a", "b", "c", "d", "e", "f"]
    assert stored["a"].offset == stored["c"].offset
    offsets = {tensor.offset for tensor in stored.values()}
    assert len(offsets) == 5
    assert all(offset % 64 == 0 for offset in offsets)
    assert unique_bytes(stored.values()) == sum(written) == 60 + 28 + 30 + 60 + 24
    for name, tensor in external_tensors(stored.values(), tmp_path).items():
        np.testing.assert_array_equal(tensor.numpy(), dict(tensors)[name].numpy())


def test_one_name_cannot_mean_two_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two different tensors are called a"):
        write_weights([("a", torch.ones(2)), ("a", torch.zeros(2))], tmp_path)


# The parity gate


def gate(traced: Traced, graph: Graph, path: Path) -> bool:
    model = traced.models[graph.role]
    feeds = make_feeds(model, graph.sizes, "random", VOCAB_SIZE)
    return passed(compare_graph(path, [("random", feeds, torch_outputs(model, feeds))], 1))


def perturbations() -> dict[str, tuple[str, Any]]:
    def scaled(factor: float) -> Any:
        return lambda tensor: tensor * factor

    return {
        "layers.0.self_attn.k_proj.weight": ("target", scaled(1.02)),
        "layers.1.post_attention_layernorm.weight": ("target", scaled(1.02)),
        "rope.sin": ("target", scaled(-1.0)),
        "lm_head.weight": ("target", scaled(1.01)),
        "embed_tokens.weight": ("target", lambda tensor: tensor.roll(1, 0)),
        "drafter.fc.weight": ("drafter", scaled(1.02)),
        "drafter.mask_embedding": ("drafter", lambda tensor: tensor.flip(0)),
        "drafter.layers.0.mlp.down_proj.weight": ("drafter", scaled(float("nan"))),
    }


@pytest.mark.parametrize("name", perturbations())
def test_the_gate_notices_a_perturbed_weight(
    name: str, llama_graphs: Traced, tmp_path: Path
) -> None:
    role, change = perturbations()[name]
    count = {"nodes": NODES} if role == "target" else {"accepted": ACCEPTED}
    graph = llama_graphs.graph(role, slots=BUCKETS[0], **count)
    tensor = weights_of(llama_graphs.models.values())[name]

    path = copy_with_weights(llama_graphs, tmp_path / "bad", graph, {name: change(tensor)})

    assert gate(llama_graphs, graph, graph.path)
    assert not gate(llama_graphs, graph, path)


def test_the_gate_notices_wrong_draft_ids(qwen3_graphs: Traced, tmp_path: Path) -> None:
    graph = qwen3_graphs.graph("drafter", slots=BUCKETS[0])
    table = weights_of(qwen3_graphs.models.values())["drafter.d2t"]

    path = copy_with_weights(
        qwen3_graphs, tmp_path / "bad", graph, {"drafter.d2t": table.roll(1, 0)}
    )

    assert not gate(qwen3_graphs, graph, path)


@pytest.mark.parametrize("fault", ["nan", "shape", "dtype"])
def test_the_gate_is_not_fooled_by_its_reference(fault: str, llama_graphs: Traced) -> None:
    graph = llama_graphs.graph("target", nodes=NODES, slots=BUCKETS[0])
    model = llama_graphs.models["target"]
    feeds = make_feeds(model, graph.sizes, "random", VOCAB_SIZE)
    wanted = torch_outputs(model, feeds)
    if fault == "nan":
        wanted["feature"] = np.full_like(wanted["feature"], np.nan)
    elif fault == "shape":
        wanted["feature"] = wanted["feature"][:, :1]
    else:
        wanted["next_token"] = wanted["next_token"].astype(np.int64)

    (row,) = compare_graph(graph.path, [("random", feeds, wanted)], 1)

    assert not row.passed


# Two rows


def test_rows_of_a_batch_have_caches_of_different_length(pair_graphs: Traced) -> None:
    for graph in pair_graphs.graphs:
        feeds = make_feeds(pair_graphs.models[graph.role], graph.sizes, "fixed", VOCAB_SIZE)
        assert len(set(feeds["cache_length"].tolist())) == 2


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_row_does_not_depend_on_its_neighbour(role: str, pair_graphs: Traced) -> None:
    graph = pair_graphs.graph(role, slots=BUCKETS[1])
    feeds = make_feeds(pair_graphs.models[role], graph.sizes, "random", VOCAB_SIZE)
    other = make_feeds(pair_graphs.models[role], graph.sizes, "fixed", VOCAB_SIZE)
    mixed = {name: np.concatenate([array[:1], other[name][1:]]) for name, array in feeds.items()}
    opened = session(graph.path)

    whole, changed = run(opened, feeds), run(opened, mixed)

    close({n: a[:1] for n, a in changed.items()}, {n: a[:1] for n, a in whole.items()})
    assert any(not np.array_equal(changed[name][1], whole[name][1]) for name in whole)


def test_the_reference_itself_is_run_stage_by_stage(llama_graphs: Traced) -> None:
    """Its logits are those of transformers, so the graphs are compared with the truth."""
    model = llama_graphs.models["target"]
    graph = llama_graphs.graph("target", nodes=NODES, slots=BUCKETS[0])
    cache = empty_cache(llama_graphs)
    feeds = target_feeds(llama_graphs, graph, [4, 5, 6, 7, 8, 9], 0, cache)

    outputs = run_graph(model, {name: torch.from_numpy(array) for name, array in feeds.items()})

    with torch.inference_mode():
        wanted = llama_graphs.hf_model(
            torch.tensor([[4, 5, 6, 7, 8, 9]]), output_hidden_states=True
        )
    torch.testing.assert_close(outputs["logits"], wanted.logits, atol=1e-4, rtol=1e-4)
    feature = torch.cat([wanted.hidden_states[1], outputs["feature"][..., 64:]], dim=-1)
    torch.testing.assert_close(outputs["feature"], feature, atol=1e-4, rtol=1e-4)


def test_the_documented_operators_are_the_allowed_ones() -> None:
    text = (Path(__file__).parent.parent / "docs" / "platforms.md").read_text()
    listed = text.split("```")[1].split()

    assert listed == sorted(ALLOWED_OPS)
