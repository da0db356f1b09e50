"""From a symbolic standard graph to the graph ONNX Runtime's CPU provider runs fastest.

Inputs and outputs keep their names, types and meaning, but for the cache: ``past_key.l`` and
``past_value.l`` come out again as ``present_key.l`` and ``present_value.l`` ``[B, Hkv, S, D]``,
to be bound to the same memory. The new rows are written there from ``cache_length`` on (behind a
drafter's real rows those of its mask slots); ``new_key.l`` and ``new_value.l`` are gone.

What the fused operators of ONNX Runtime's own domain take over:

============================== ===============================================================
GroupQueryAttention            rotary positions, score products, mask, softmax, the cache's rows
SimplifiedLayerNormalization   RMS norm; with ``Skip`` also the residual sum before it
QuickGelu                      SiLU
============================== ===============================================================

Nothing is left half fused: an attention that does not match is an error that names its node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnx_ir.tape import Tape
from onnxscript.rewriter import RewritePass, pattern

from pspec.errors import EngineError

CONTRIB = "com.microsoft"
_OWN = "pspec"
"""Domain of operators that stand for a matched pattern until they are lowered."""
_MASKED = -1e9
_TURNED = 16
"""Heads whose size is a multiple of this are rotated by the fused attention itself."""


def fuse_graph(model: ir.Model) -> ir.Model:
    """Fuse a copy of ``model``, a symbolic graph of a bundle.

    Raises:
        EngineError: naming the node, where an attention does not have the known form.
    """
    model = model.clone()
    graph = model.graph
    RewritePass(pattern.RewriteRuleSet([*_RULES, *([_ROTATE] if _turns(graph) else [])]))(model)
    _lower_attention(graph)
    _join_residuals(graph)
    graph.opset_imports[CONTRIB] = 1
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    graph.opset_imports.pop(_OWN, None)
    return model


# Patterns. Each function draws the subgraph it matches; its twin draws what takes its place.


def _rms_norm(op: Any, x: Any, weight: Any, axes: Any, epsilon: Any) -> Any:
    size = op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), axes), epsilon))
    return op.Mul(op.Div(x, size), weight)


def _fused_rms_norm(op: Any, x: Any, weight: Any, epsilon: Any, **_: Any) -> Any:
    return op.SimplifiedLayerNormalization(x, weight, epsilon=_scalar(epsilon), axis=-1)


def _silu(op: Any, x: Any) -> Any:
    return op.Mul(x, op.Sigmoid(x))


def _fused_silu(op: Any, x: Any) -> Any:
    return op.QuickGelu(x, alpha=1.0, _domain=CONTRIB)


def _rotate(
    op: Any, x: Any, cos: Any, sin: Any, zero: Any, half: Any, end: Any, axis: Any, step: Any
) -> Any:
    second, first = op.Slice(x, half, end, axis, step), op.Slice(x, zero, half, axis, step)
    return op.Add(op.Mul(x, cos), op.Mul(op.Concat(op.Neg(second), first, axis=-1), sin))


def _fused_rotate(op: Any, x: Any, cos: Any, sin: Any, **_: Any) -> Any:
    return op.Rotate(x, cos, sin, _domain=_OWN)


def _attention(
    op: Any,
    query: Any,
    scale: Any,
    past_key: Any,
    past_value: Any,
    key: Any,
    value: Any,
    visible: Any,
    masked: Any,
    by_group: Any,
    by_head: Any,
    flat: Any,
    zero: Any,
    split: Any,
    end: Any,
    axis: Any,
    step: Any,
) -> Any:
    grouped = op.Reshape(op.Mul(query, scale), by_group)
    past = op.MatMul(grouped, op.Transpose(past_key, perm=[0, 1, 3, 2]))
    new = op.MatMul(grouped, op.Transpose(key, perm=[0, 1, 3, 2]))
    weights = op.Softmax(op.Where(visible, op.Concat(past, new, axis=-1), masked), axis=-1)
    mixed = op.Add(
        op.MatMul(op.Slice(weights, zero, split, axis, step), past_value),
        op.MatMul(op.Slice(weights, split, end, axis, step), value),
    )
    return op.Reshape(op.Transpose(op.Reshape(mixed, by_head), perm=[0, 2, 1, 3]), flat)


def _fused_attention(
    op: Any,
    query: Any,
    scale: Any,
    past_key: Any,
    past_value: Any,
    key: Any,
    value: Any,
    visible: Any,
    **_: Any,
) -> Any:
    inputs = (query, key, value, past_key, past_value, visible)
    return op.Attention(*inputs, scale=_scalar(scale), _domain=_OWN)


_ROTATE = pattern.RewriteRule(_rotate, _fused_rotate)
_RULES = [
    pattern.RewriteRule(_rms_norm, _fused_rms_norm),
    pattern.RewriteRule(_silu, _fused_silu),
    pattern.RewriteRule(_attention, _fused_attention),
]


def _turns(graph: ir.Graph) -> bool:
    """Whether the fused attention rotates heads of this size; else they are rotated before it."""
    past = next(value for value in graph.inputs if value.name == "past_key.0")
    return _size(past, 3) % _TURNED == 0


def _lower_attention(graph: ir.Graph) -> None:
    """Attention nodes become GroupQueryAttention over a cache that is written in place."""
    attentions = [node for node in graph if node.op_type == "Attention" and node.domain == _OWN]
    expected = sum(value.name.startswith("past_key.") for value in graph.inputs if value.name)
    if len(attentions) != expected:
        softmax = next((node.name for node in graph if node.op_type == "Softmax"), "?")
        raise EngineError(f"graph {graph.name}: the attention of {softmax} has no fused form")
    ends = [end for end in graph.outputs if not str(end.name).startswith("new_")]
    tape = Tape(graph)
    common = _Common(graph, tape)
    for node in attentions:
        ends += _lower(node, tape, common)
    graph.outputs.clear()
    graph.outputs.extend(ends)


class _Common:
    """Values that all layers of one graph share, made once."""

    def __init__(self, graph: ir.Graph, tape: Tape) -> None:
        self._tape = tape
        self._tables: dict[str, ir.Value] = {}
        self._lengths = next(value for value in graph.inputs if value.name == "cache_length")
        self._made: dict[ir.Value, tuple[ir.Value, ...]] = {}

    def mask(self, visible: ir.Value) -> tuple[ir.Value, ...]:
        """``seqlens [B]``, ``total [1]`` and ``bias [B, 1, N, longest + N]`` of a visibility mask.

        Every row of the cache counts up to its length, which ``seqlens`` says; the mask among the
        new rows becomes an additive bias behind as many zeros as the longest cache has rows.
        """
        if visible not in self._made:
            self._made[visible] = self._mask(_new_part(visible))
        return self._made[visible]

    def _mask(self, new: ir.Value) -> tuple[ir.Value, ...]:
        op = self._tape.op
        one = self._constant("one", np.array([1], np.int64))
        longest = op("ReduceMax", [self._lengths], {"keepdims": 1})
        count = op("Shape", [new], {"start": 1, "end": 2})
        added = op("Cast", [count], {"to": ir.DataType.INT32})
        total = op("Add", [longest, added])
        last = self._constant("last", np.array([1], np.int32))
        seqlens = op("Sub", [op("Add", [self._lengths, added]), last])
        batch = op("Shape", [new], {"start": 0, "end": 1})
        wide = op("Cast", [longest], {"to": ir.DataType.INT64})
        shape = op("Concat", [batch, one, count, wide], {"axis": 0})
        seen = self._constant("seen", np.array(0.0, np.float32))
        unseen = self._constant("unseen", np.array(_MASKED, np.float32))
        past = op("Expand", [seen, shape])
        among = op("Where", [op("Unsqueeze", [new, one]), seen, unseen])
        return seqlens, total, op("Concat", [past, among], {"axis": -1})

    def rotary(self, cos: ir.Value, sin: ir.Value) -> list[ir.Value | None]:
        """Both tables and the positions that are looked up in them."""
        lookups = [
            _producer(_values(_producer(part, "Unsqueeze").inputs)[0], "Gather")
            for part in (cos, sin)
        ]
        (cosines, ids), (sines, _) = (_values(lookup.inputs) for lookup in lookups)
        return [self._half(cosines), self._half(sines), self._positions(ids)]

    def _positions(self, ids: ir.Value) -> ir.Value:
        if ids not in self._made:
            self._made[ids] = (self._tape.op("Cast", [ids], {"to": ir.DataType.INT64}),)
        return self._made[ids][0]

    def _half(self, table: ir.Value) -> ir.Value:
        """``[positions, D / 2]``: the operator wants a rotary table without its second half."""
        name = f"{table.name}.half"
        if name not in self._tables:
            tensor = table.const_value
            assert tensor is not None
            rows = tensor.numpy()
            self._tables[name] = self._constant(name, rows[:, : rows.shape[1] // 2].copy())
        return self._tables[name]

    def _constant(self, name: str, array: Any) -> ir.Value:
        return self._tape.initializer(ir.tensor(array, name=f"fused/{name}"))


def _lower(node: ir.Node, tape: Tape, common: _Common) -> list[ir.Value]:
    """One layer; returns its two present outputs."""
    query, key, value, past_key, past_value, visible = _values(node.inputs)
    tables: list[ir.Value | None] = [None, None, None]
    maker = query.producer()
    if maker is not None and maker.op_type == "Rotate":
        query, cos, sin = _values(maker.inputs)
        key = _values(_producer(key, "Rotate").inputs)[0]
        tables = common.rotary(cos, sin)
    flat = [_flat(part, tape) for part in (query, key, value)]
    seqlens, total, bias = common.mask(visible)
    heads, size = _size(past_key, 1), _size(past_key, 3)
    mixed, *present = tape.op_multi_out(
        "GroupQueryAttention",
        [*flat, past_key, past_value, seqlens, total, *tables, bias],
        {
            "num_heads": _width(query) // size,
            "kv_num_heads": heads,
            "do_rotary": int(tables[0] is not None),
            "scale": node.attributes["scale"].as_float(),
        },
        num_outputs=3,
        domain=CONTRIB,
        name=str(node.name),
    )
    _take_place(node.outputs[0], mixed)
    for past, end in zip((past_key, past_value), present, strict=True):
        end.name = str(past.name).replace("past_", "present_")
        end.shape, end.type = past.shape, past.type
    return present


def _flat(x: ir.Value, tape: Tape) -> ir.Value:
    """``[B, heads, N, D]`` back to ``[B, N, heads * D]``, mostly by undoing what made it."""
    maker = x.producer()
    if maker is not None and maker.op_type == "Transpose":
        split = _values(maker.inputs)[0]
        maker = split.producer()
        if maker is not None and maker.op_type == "Reshape":
            return _values(maker.inputs)[0]
    else:
        split = tape.op("Transpose", [x], {"perm": [0, 2, 1, 3]})
    shape = tape.initializer(ir.tensor(np.array([0, 0, -1], np.int64), name=f"{x.name}/flat"))
    return tape.op("Reshape", [split, shape])


def _width(x: ir.Value) -> int:
    """Size of all heads together: that of the projection that ``x`` was made of."""
    while (maker := x.producer()) is not None:
        x = _values(maker.inputs)[0]
        if x.shape is not None and len(x.shape) == 3 and isinstance(x.shape[2], int):
            return x.shape[2]
    raise EngineError(f"{x.name}: no projection before this attention")


def _new_part(visible: ir.Value) -> ir.Value:
    """``[B, N, N]`` bool out of ``[B, 1, G * N, S + N]``: who sees whom among the new rows."""
    tiled = _values(_producer(visible, "Unsqueeze").inputs)[0]
    maker = _producer(tiled, "Concat")
    parts = _values(maker.inputs)
    if len(set(parts)) == 1:  # the same mask once per query head of a group
        parts = _values(_producer(parts[0], "Concat").inputs)
    return parts[1]


def _join_residuals(graph: ir.Graph) -> None:
    """A residual sum and the norm that reads it become one operator."""
    tape = Tape(graph)
    for norm in [node for node in graph if node.op_type == "SimplifiedLayerNormalization"]:
        total, weight = _values(norm.inputs)
        add = total.producer()
        if (
            add is None
            or add.op_type != "Add"
            or any(v.is_initializer() for v in _values(add.inputs))
        ):
            continue
        normed, _, _, residual = tape.op_multi_out(
            "SkipSimplifiedLayerNormalization",
            [*_values(add.inputs), weight],
            {"epsilon": norm.attributes["epsilon"].as_float()},
            num_outputs=4,
            domain=CONTRIB,
            name=str(norm.name),
        )
        for old, new in ((norm.outputs[0], normed), (total, residual)):
            _take_place(old, new)
        graph.remove([norm, add], safe=True)


def _take_place(old: ir.Value, new: ir.Value) -> None:
    """``new`` gets the name and the users of ``old``, the graph's own outputs included."""
    new.name, old.name = old.name, None
    new.shape, new.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _size(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise EngineError(f"{value.name}: its axis {axis} has no fixed size")
    return size


def _producer(value: ir.Value, op_type: str) -> ir.Node:
    node = value.producer()
    if node is None or node.op_type != op_type:
        found = node.op_type if node else "an input"
        raise EngineError(f"{value.name}: no fused form for {found}, expected {op_type}")
    return node


def _values(values: Any) -> list[ir.Value]:
    return list(values)


def _scalar(value: ir.Value) -> float:
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None
    return float(tensor.numpy().reshape(-1)[0])
