"""What a static graph may hold: standard operators that every target compiler takes, static shapes.

The list is that of TensorRT 10.3's ONNX importer for plugin-free graphs, raised to opset 18.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pspec.errors import ConfigError

_OPERATORS = """
Add And ArgMax Cast Concat DequantizeLinear Div Equal Erf Expand Gather Identity Less Log MatMul Mul
Neg Not ReduceMax ReduceMean ReduceMin Reshape Sigmoid Slice Softmax Sqrt Squeeze Sub Tanh TopK
Transpose Unsqueeze Where
"""
ALLOWED_OPS = frozenset(_OPERATORS.split())
_INT32 = 2**31 - 1
_BOUNDARY = {ir.DataType.INT32, ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.FLOAT16}
_INSIDE = _BOUNDARY | {ir.DataType.INT64}


@dataclass(frozen=True)
class Finding:
    """One thing a static graph must not hold."""

    where: str
    reason: str


def lint_graph(model: ir.Model) -> list[Finding]:
    """Everything in ``model`` that a platform could not express, named by node or tensor."""
    graph = model.graph
    findings = [
        Finding(str(value.name), f"{value.dtype} at the boundary, expected int32, bool or float")
        for value in (*graph.inputs, *graph.outputs)
        if value.dtype not in _BOUNDARY
    ]
    for value in (*graph.inputs, *graph.outputs):
        findings += _shape_findings(str(value.name), value)
    for node in graph:
        findings += _node_findings(node)
    for value in graph.initializers.values():
        findings += _constant_findings(value)
    return findings


def check_graph(model: ir.Model, name: str) -> None:
    """Raise on the first finding.

    Raises:
        ConfigError: naming graph, node and reason.
    """
    for finding in lint_graph(model):
        raise ConfigError(f"graph {name}: {finding.where}: {finding.reason}")


def _node_findings(node: ir.Node) -> list[Finding]:
    where = str(node.name)
    findings = []
    if node.domain not in ("", "ai.onnx"):
        findings.append(Finding(where, f"operator {node.domain}.{node.op_type} is not standard"))
    elif node.op_type not in ALLOWED_OPS:
        findings.append(Finding(where, f"operator {node.op_type} is not in the portable set"))
    if node.op_type == "DequantizeLinear":
        findings += _scale_findings(node)
    for value in node.outputs:
        findings += _shape_findings(where, value)
        if value.dtype not in _INSIDE:
            findings.append(Finding(where, f"{value.name} is {value.dtype}, which is not portable"))
    return findings


def _scale_findings(node: ir.Node) -> list[Finding]:
    """Symmetric weights only, with scales that a compiler accepts: positive and finite."""
    where = str(node.name)
    if len(node.inputs) > 2:
        return [Finding(where, "a zero point is not portable: weights are stored symmetric")]
    weight, scale = node.inputs
    tensor = scale.const_value if scale is not None else None
    if weight is None or scale is None or weight.const_value is None or tensor is None:
        return [Finding(where, "only stored weights may be quantised")]
    scales = tensor.numpy()
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        return [Finding(where, f"{scale.name} holds a scale that is not positive and finite")]
    return []


def _shape_findings(where: str, value: ir.Value) -> list[Finding]:
    if value.shape is not None and value.shape.is_static():
        return []
    return [Finding(where, f"{value.name} has shape {value.shape}, expected numbers only")]


def _constant_findings(value: ir.Value) -> list[Finding]:
    tensor = value.const_value
    if tensor is None:
        return [Finding(str(value.name), "initialiser without a value")]
    if tensor.dtype != ir.DataType.INT64 or isinstance(tensor, ir.ExternalTensor):
        return []
    numbers = np.asarray(tensor.numpy())
    if (numbers.clip(-_INT32, _INT32) != numbers).any():  # abs() of the least int64 is negative
        return [Finding(str(value.name), "an int64 constant does not fit 32 bits")]
    return []
