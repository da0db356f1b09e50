"""Every static graph goes through NVIDIA's own parser and compiler; none of it needs a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphs import Graph, Traced, trace_tiny
from pspec.errors import EngineError
from pspec.export.rtx import build_engine_bytes, parse_graph

pytestmark = pytest.mark.trt


@pytest.fixture
def installed() -> None:
    pytest.importorskip(
        "tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'pspec-toolkit[rtx]'"
    )


def assert_builds(graphs: Sequence[Graph]) -> None:
    for graph in graphs:
        assert parse_graph(graph.path) == [], graph.path.name
        assert len(build_engine_bytes(graph.path)) > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "pair"])
def test_every_frozen_graph_builds(kind: str, request: pytest.FixtureRequest) -> None:
    traced: Traced = request.getfixturevalue(f"{kind}_graphs")

    assert len(traced.graphs) == 10
    assert_builds(traced.graphs)


ODD = {
    "one slot, features as they are": {
        "slots": 1,
        "fuse": "feature-only",
        "features": "last",
        "mask_feature": "none",
    },
    "no features": {"features": "none", "fuse": "none", "mask_feature": "none", "shift": False},
}


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ODD)
def test_odd_drafters_build(name: str, tmp_path: Path) -> None:
    fields = ODD[name]
    features = "last" if fields["features"] == "last" else ()

    traced = trace_tiny(tmp_path, "llama", features=features, drafter=fields)

    assert_builds([graph for graph in traced.graphs if graph.role == "drafter"])


def save(path: Path, nodes: Sequence[onnx.NodeProto], width: int = 3) -> Path:
    """``x [2, width]`` through ``nodes`` to ``z``, of the same shape."""
    shape = [2, width]
    graph = helper.make_graph(
        nodes,
        "planted",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([4096], np.int64), "k")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("op", "domain"),
    [("FusedMatMul", "com.microsoft"), ("NoSuchOperator", "com.microsoft")],
)
def test_an_unsupported_operator_is_named(op: str, domain: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"], name="layers.0/fine"),
        helper.make_node(op, ["y", "y"], ["z"], name="layers.0/planted", domain=domain),
    ]
    path = save(tmp_path / "planted.onnx", nodes)

    errors = parse_graph(path)

    assert errors
    assert "layers.0/planted" in errors[0]
    assert op in errors[0]
    with pytest.raises(
        EngineError, match=r"cannot parse planted\.onnx: layers\.0/planted"
    ) as caught:
        build_engine_bytes(path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_what_only_the_compiler_refuses_is_named(tmp_path: Path) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["z", "ids"], name="head/large_topk")
    path = save(tmp_path / "planted.onnx", [node], width=9000)

    assert parse_graph(path) == []
    with pytest.raises(
        EngineError, match=r"cannot build planted\.onnx: .*head/large_topk"
    ) as caught:
        build_engine_bytes(path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("data", [b"", b"no graph at all", None])
def test_a_file_that_is_no_graph_is_refused(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "empty.onnx"
    if data is not None:
        path.write_bytes(data)

    assert parse_graph(path)
    with pytest.raises(EngineError, match=r"cannot parse empty\.onnx"):
        build_engine_bytes(path)


@pytest.mark.usefixtures("installed")
def test_a_graph_without_its_weights_is_refused(llama_graphs: Traced, tmp_path: Path) -> None:
    path = tmp_path / "alone.onnx"
    path.write_bytes(llama_graphs.graphs[0].path.read_bytes())

    errors = parse_graph(path)

    assert errors
    assert "Failed to import initializer: embed_tokens.weight" in " ".join(errors)


def test_a_missing_library_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)

    for function in (parse_graph, build_engine_bytes):
        with pytest.raises(EngineError, match=re.escape("pip install 'pspec-toolkit[rtx]'")):
            function(tmp_path / "any.onnx")
