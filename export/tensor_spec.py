"""What a manifest says of a graph's inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from pspec.runtime.manifest import DType, TensorSpec

_NAMES: dict[ir.DataType, DType] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.INT32: "int32",
    ir.DataType.BOOL: "bool",
}


def tensor_specs(values: Iterable[ir.Value]) -> tuple[TensorSpec, ...]:
    """Name, shape (numbers, or names of open sizes) and type of each value."""
    found = []
    for value in values:
        assert value.shape is not None
        assert value.dtype is not None
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        found.append(TensorSpec(str(value.name), shape, _NAMES[value.dtype]))
    return tuple(found)
