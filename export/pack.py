"""Products with quantised weights as ONNX Runtime's packed operator, ``MatMulNBits``.

``MatMul(x, DequantizeLinear(q, s))`` with ``q [K, N]`` becomes one node over ``[N, K / block,
block * bits / 8]`` bytes. The accuracy level decides whether the inputs of a product are quantised
as well: at 4 they are rounded to 8 bits in blocks, at 1 they stay fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as passes
from onnx_ir.tape import Tape

CONTRIB = "com.microsoft"
_COLUMN_BLOCK = 64
"""Inputs of a block where a whole column shares one scale: the operator wants blocks."""


def pack_products(model: ir.Model, accuracy_level: int) -> None:
    """Replace every product with a quantised weight, in place."""
    graph = model.graph
    tape = Tape(graph)
    for product, weight in list(_products(graph)):
        integers, scales, block, bits = _read(weight)
        name = str(weight.outputs[0].name)
        inputs, outputs = integers.shape
        packed = ir.tensor(pack_weight(integers, block, bits), name=f"{name}.packed")
        factors = ir.tensor(pack_scales(scales, inputs, block), name=f"{name}.scales")
        result = tape.op(
            "MatMulNBits",
            [product.inputs[0], tape.initializer(packed), tape.initializer(factors)],
            {
                "K": inputs,
                "N": outputs,
                "bits": bits,
                "block_size": block,
                "accuracy_level": accuracy_level,
            },
            domain=CONTRIB,
            name=str(product.name),
        )
        old = product.outputs[0]
        result.name, old.name = old.name, None
        result.shape, result.type = old.shape, old.type
        ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
        graph.remove(product, safe=True)
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)


def set_accuracy(model: ir.Model, level: int) -> None:
    """Change the accuracy level of every packed product."""
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", level)


def pack_weight(integers: NDArray[np.int8], block: int, bits: int) -> NDArray[np.uint8]:
    """``[K, N]`` signed to ``[N, blocks, block * bits / 8]`` unsigned, padded with zeros."""
    inputs, outputs = integers.shape
    zero = 1 << (bits - 1)
    blocks = -(-inputs // block)
    padded = np.full((outputs, blocks * block), zero, np.uint8)
    padded[:, :inputs] = (integers.T.astype(np.int16) + zero).astype(np.uint8)
    grouped = padded.reshape(outputs, blocks, block)
    return grouped if bits == 8 else grouped[..., 0::2] | (grouped[..., 1::2] << 4)


def pack_scales(scales: NDArray[np.float32], inputs: int, block: int) -> NDArray[np.float32]:
    """``[blocks, N]``, or ``[N]`` for whole columns, to ``[N * blocks]``."""
    if scales.ndim == 1:
        scales = np.broadcast_to(scales, (-(-inputs // block), len(scales)))
    return np.ascontiguousarray(scales.T).reshape(-1)


def _products(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Each ``MatMul`` with a dequantised weight, and the node that dequantises it."""
    for node in graph:
        if node.op_type != "MatMul" or node.inputs[1] is None:
            continue
        maker = node.inputs[1].producer()
        if maker is not None and maker.op_type == "DequantizeLinear":
            yield node, maker


def _read(weight: ir.Node) -> tuple[NDArray[np.int8], NDArray[np.float32], int, int]:
    """Integers ``[K, N]``, scales, inputs of a block, and bits of a stored weight."""
    stored, scale = (_constant(value) for value in weight.inputs[:2])
    bits = 4 if stored.dtype == ir.DataType.INT4 else 8
    integers = stored.numpy().astype(np.int8)
    block = weight.attributes["block_size"].as_int() if "block_size" in weight.attributes else 0
    return integers, scale.numpy(), block or _COLUMN_BLOCK, bits


def _constant(value: ir.Value | None) -> ir.TensorProtocol:
    assert value is not None
    assert value.const_value is not None
    return value.const_value
