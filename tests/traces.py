"""Tracing is nearly all the time of a tiny export: equal stages are traced once a session.

Weights are no part of a trace, so targets of one shape share theirs, whatever their precision.
"""

from __future__ import annotations

from torch import nn

from pspec.export.trace import TracedStage, trace_stage
from pspec.models.graph import GraphModel, Stage

_TRACED: dict[tuple[str, ...], TracedStage] = {}


def trace_stages_once(model: GraphModel) -> dict[str, TracedStage]:
    """What :func:`pspec.export.trace.trace_stages` gives; nothing may be changed in it."""
    traced: dict[str, TracedStage] = {}
    for stage in model.stages:
        if stage.kind not in traced:
            key = _structure(model, stage)
            if key not in _TRACED:
                _TRACED[key] = trace_stage(model, stage)
            traced[stage.kind] = _TRACED[key]
    return traced


def _structure(model: GraphModel, stage: Stage) -> tuple[str, ...]:
    """Everything a trace depends on: modules, their settings, shapes of weights and values."""
    values = [repr(model.value(name)) for name in (*stage.inputs, *stage.outputs)]
    modules = [_module(name, module) for name, module in stage.module.named_modules()]
    return (stage.kind, repr(model.dims), repr([*stage.weights]), *values, *modules)


def _module(name: str, module: nn.Module) -> str:
    settings = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    return f"{name} {type(module).__qualname__} {settings} {shapes}"
