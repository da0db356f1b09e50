"""One stage of a model, traced once by ``torch.onnx.export`` with symbolic sizes.

The result is an ``onnx_ir`` model whose weights are names only: their bytes are written once, by
:mod:`pspec.export.weights`, and never pass through the tracer.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules.common import squeeze_reshape_1d_rule
from torch.export import Dim

from pspec.models.graph import TORCH_TYPES, GraphModel, Stage, Value

OPSET = 18
IR_VERSION = 8
"""IR 8 came with opset 18: the oldest that carries it, so the widest set of readers."""

_EXAMPLE_SIZES = (3, 7, 23, 5)
"""Sizes while tracing, one a symbolic dim: all different, and no size that torch specialises."""
_MAX_DIM = 1 << 20
_FOLD_LIMIT = 4 * _MAX_DIM
"""Bytes of the largest constant made by folding: the numbers of the cache's slots."""


@dataclass(frozen=True)
class TracedStage:
    """Graph of one stage kind.

    Its inputs are the stage's inputs, then its weights (so that nothing can fold one); its outputs
    are the stage's, in order.
    """

    kind: str
    model: ir.Model
    weights: tuple[str, ...]


def trace_stages(model: GraphModel) -> dict[str, TracedStage]:
    """Trace the first stage of every kind."""
    traced: dict[str, TracedStage] = {}
    for stage in model.stages:
        if stage.kind not in traced:
            traced[stage.kind] = trace_stage(model, stage)
    return traced


def trace_stage(model: GraphModel, stage: Stage) -> TracedStage:
    """Trace one stage with the symbolic sizes of ``model.dims``."""
    sizes = dict(zip(model.dims, _EXAMPLE_SIZES, strict=False))
    dims = {name: Dim(name, min=1, max=_MAX_DIM) for name in model.dims}
    values = [model.value(name) for name in stage.inputs]
    example = tuple(example_tensor(value, sizes) for value in values)
    shapes = tuple(_dynamic_shape(value, dims) for value in values)
    with _quiet():
        program = torch.onnx.export(
            stage.module,
            example,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            dynamic_shapes=_group_variadic(stage.module, shapes),
        )
    assert program is not None
    graph = program.model.graph
    for value, traced in zip(values, graph.inputs, strict=True):
        traced.shape = ir.Shape(value.shape)
    for name, traced in zip(stage.outputs, graph.outputs, strict=True):
        traced.shape = ir.Shape(model.value(name).shape)
    for name in stage.weights:
        weight = graph.initializers.pop(name)
        weight.const_value = None
        graph.inputs.append(weight)
    return TracedStage(stage.kind, program.model, tuple(stage.weights))


def freeze_stage(traced: TracedStage, sizes: Mapping[str, int]) -> ir.Model:
    """A copy with its symbolic sizes set (none set: still symbolic), folded and cleaned.

    Every intermediate shape is inferred afresh, so no symbol of the trace survives in a frozen
    graph.
    """
    model = traced.model.clone()
    graph = model.graph
    ends = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for value in (*graph.inputs, *graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([_resolve(dim, sizes) for dim in value.shape])
    for node in graph:
        for value in node.outputs:
            if id(value) not in ends:
                value.shape = None
    _simplify(model)
    _narrow_constants(graph)
    return model


def _simplify(model: ir.Model) -> None:
    """Fold constants and tidy up.

    ``optimizer.optimize`` would do more: to it an epsilon of 1e-8 is zero and need not be added.
    """
    for _ in range(2):  # a folded size may make more foldable
        optimizer.fold_constants(model, onnx_shape_inference=True, output_size_limit=_FOLD_LIMIT)
        RewritePass([squeeze_reshape_1d_rule])(model)
        passes.RemoveUnusedNodesPass()(model)
    for step in (
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        step(model)


def size_of(dim: int | str, sizes: Mapping[str, int]) -> int:
    """Value of a dim such as ``nodes``, ``3*nodes`` or ``slots + nodes + 3``."""
    if isinstance(dim, int):
        return dim
    total = 0
    for term in dim.split("+"):
        factor, _, name = term.strip().rpartition("*")
        total += int(factor or 1) * (int(name) if name.isdigit() else sizes[name])
    return total


def example_tensor(value: Value, sizes: Mapping[str, int]) -> torch.Tensor:
    """Ones of a value's type and shape."""
    shape = [size_of(dim, sizes) for dim in value.shape]
    return torch.ones(shape, dtype=TORCH_TYPES[value.dtype])


def _resolve(dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | str:
    name = dim if isinstance(dim, int) else str(dim.value)
    return size_of(name, sizes) if sizes or isinstance(name, int) else name


def _dynamic_shape(value: Value, dims: Mapping[str, Any]) -> dict[int, Any]:
    symbolic = {axis: dim for axis, dim in enumerate(value.shape) if isinstance(dim, str)}
    return {axis: _torch_dim(dim, dims) for axis, dim in symbolic.items()}


def _torch_dim(dim: str, dims: Mapping[str, Any]) -> Any:
    """Torch knows multiples of a dim; a sum it has to work out by itself."""
    if "+" in dim:
        return Dim.AUTO
    factor, _, name = dim.rpartition("*")
    return int(factor) * dims[name] if factor else dims[name]


def _group_variadic(module: torch.nn.Module, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Torch wants the shapes of ``*args`` as one tuple of their own."""
    code = module.forward.__code__
    if not code.co_flags & inspect.CO_VARARGS:
        return shapes
    named = code.co_argcount - 1
    return (*shapes[:named], tuple(shapes[named:])) if shapes[named:] else shapes


def _narrow_constants(graph: ir.Graph) -> None:
    """Clamp int64 constants to 32 bits: an open-ended slice ends at INT64_MAX in the trace."""
    limit = 2**31 - 1
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.INT64:
            continue
        numbers = tensor.numpy()
        narrow = numbers.clip(-limit, limit)
        if (narrow != numbers).any():
            value.const_value = ir.tensor(narrow, name=value.name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracer's own chatter; its exceptions still pass."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
