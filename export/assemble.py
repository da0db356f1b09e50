"""A whole graph from its stages: each traced stage is copied in under its own names.

Nodes are called ``stage/op``, for example ``layers.3/self_attn.q_proj`` values keep the model's
names, so a profile or an error message can be read without a map.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes import common as passes

from pspec.export.trace import IR_VERSION, OPSET, TracedStage, freeze_stage, size_of
from pspec.models.graph import GraphModel, Stage, Value

INT4_OPSET, INT4_IR_VERSION = 21, 10
"""The first versions that know 4-bit integers and scales per block."""

_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "int32": ir.DataType.INT32,
    "bool": ir.DataType.BOOL,
}


def assemble_graph(
    model: GraphModel,
    traced: Mapping[str, TracedStage],
    tensors: Mapping[str, ir.ExternalTensor],
    sizes: Mapping[str, int],
    name: str,
) -> ir.Model:
    """Join the stages into one model; with ``sizes`` empty it stays symbolic."""
    frozen = {kind: freeze_stage(stage, sizes) for kind, stage in traced.items()}
    inputs = {value.name: _graph_value(value, sizes) for value in model.inputs}
    graph = ir.Graph(
        inputs=list(inputs.values()),
        outputs=[],
        nodes=[],
        opset_imports={"": OPSET},
        name=name,
    )
    values: dict[str, ir.Value] = dict(inputs)
    weights = _Weights(graph, tensors)
    for stage in model.stages:
        _copy_stage(graph, stage, frozen[stage.kind], values, weights)
    for value in model.outputs:
        end = values[value.name]
        end.name, end.shape = value.name, _shape(value, sizes)
        end.dtype = _TYPES[value.dtype]
        graph.outputs.append(end)
    version = IR_VERSION
    if any(value.dtype == ir.DataType.INT4 for value in graph.initializers.values()):
        graph.opset_imports[""], version = INT4_OPSET, INT4_IR_VERSION
    result = ir.Model(graph, ir_version=version, producer_name="pspec")
    _clean(result)
    return result


def _copy_stage(
    graph: ir.Graph,
    stage: Stage,
    frozen: ir.Model,
    values: dict[str, ir.Value],
    weights: _Weights,
) -> None:
    part = frozen.clone().graph
    sources = [values[name] for name in stage.inputs]
    sources += [weights.value(name) for name in stage.weights.values()]
    for inner, outer in zip(part.inputs, sources, strict=True):
        ir.convenience.replace_all_uses_with(inner, outer)
    for key, inner in list(part.initializers.items()):
        assert inner.const_value is not None
        constant = ir.tensor(inner.const_value.numpy(), name=f"{stage.name}/{key}")
        ir.convenience.replace_all_uses_with(inner, _initializer(graph, constant))
    outputs = list(part.outputs)
    part.outputs.clear()
    nodes = list(part)
    part.remove(nodes)
    for node in nodes:
        node.name = f"{stage.name}/{node.name}"
        for output in node.outputs:
            output.name = f"{stage.name}/{output.name}"
    graph.extend(nodes)
    for name, end in zip(stage.outputs, outputs, strict=True):
        end.name = name
        values[name] = end


class _Weights:
    """Weights by name: an initialiser, or what ``DequantizeLinear`` makes of two."""

    def __init__(self, graph: ir.Graph, tensors: Mapping[str, ir.ExternalTensor]) -> None:
        self._graph = graph
        self._tensors = tensors
        self._made: dict[str, ir.Value] = {}

    def value(self, name: str) -> ir.Value:
        if name in self._tensors:
            return _initializer(self._graph, self._tensors[name])
        if name not in self._made:
            self._made[name] = self._dequantised(name)
        return self._made[name]

    def _dequantised(self, name: str) -> ir.Value:
        integers, scale = self._tensors[f"{name}.quantised"], self._tensors[f"{name}.scale"]
        axis, attributes = 1, []
        rows, blocks = integers.shape.numpy()[0], scale.shape.numpy()
        if len(blocks) == 2:  # one row of scales a block of inputs
            axis, block = 0, rows // blocks[0]
            attributes = [ir.AttrInt64("block_size", block)]
        node = ir.Node(
            "",
            "DequantizeLinear",
            [_initializer(self._graph, integers), _initializer(self._graph, scale)],
            [ir.AttrInt64("axis", axis), *attributes],
            name=f"{name}/dequantise",
        )
        node.outputs[0].name = name
        node.outputs[0].shape = ir.Shape(integers.shape.numpy())
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        self._graph.append(node)
        return node.outputs[0]


def _initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """The graph's initialiser of a tensor, made once per name."""
    name = tensor.name
    assert name is not None
    if name not in graph.initializers:
        kind = ir.TensorType(tensor.dtype)
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def _graph_value(value: Value, sizes: Mapping[str, int]) -> ir.Value:
    kind = ir.TensorType(_TYPES[value.dtype])
    return ir.Value(name=value.name, shape=_shape(value, sizes), type=kind, doc_string=value.doc)


def _shape(value: Value, sizes: Mapping[str, int]) -> ir.Shape:
    return ir.Shape([size_of(dim, sizes) if sizes else dim for dim in value.shape])


def _clean(model: ir.Model) -> None:
    # The tracer's notes name files of this machine, and outweigh the graph.
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for step in (
        passes.RemoveUnusedNodesPass(),
        passes.DeduplicateInitializersPass(size_limit=1024),
    ):
        step(model)
