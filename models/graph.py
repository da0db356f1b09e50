"""How a model says what its graph is: named values and a list of stages.

A :class:`GraphModel` is run by walking its stages, and exported by tracing one stage of each kind
and repeating it. Thirty identical blocks cost one trace, and PyTorch and ONNX follow one list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

DType = Literal["float32", "float16", "int32", "bool"]
Dim = int | str
"""A fixed size, or the name of a symbolic one (or a sum such as ``S + N``)."""

TORCH_TYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "bool": torch.bool,
}


@dataclass(frozen=True)
class Value:
    """One named tensor of a graph: an input, an output, or what passes between two stages."""

    name: str
    shape: tuple[Dim, ...]
    dtype: DType
    doc: str = ""


@dataclass(frozen=True)
class Stage:
    """One module of the graph and the values it reads and writes, by name.

    Attributes:
        name: unique prefix of the stage's nodes, for example ``layers.3``.
        kind: stages of one kind have the same structure and are traced once.
        module: called with the inputs in order; returns one tensor or a tuple.
        inputs: value names.
        outputs: value names.
        weights: parameter or buffer name inside ``module`` to the tensor's name in the weight file.
    """

    name: str
    kind: str
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, str]


class GraphModel(Protocol):
    """What the exporter asks of a model."""

    @property
    def inputs(self) -> Sequence[Value]: ...
    @property
    def outputs(self) -> Sequence[Value]: ...
    @property
    def stages(self) -> Sequence[Stage]: ...
    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the symbolic sizes, each of which an example and a frozen graph must set."""
        ...

    def value(self, name: str) -> Value:
        """Shape and type of any value a stage reads or writes."""
        ...


@torch.inference_mode()
def run_graph(model: GraphModel, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the stages in order in PyTorch; the reference that exported graphs are compared with."""
    values = dict(feeds)
    for stage in model.stages:
        result = stage.module(*(values[name] for name in stage.inputs))
        results = (result,) if isinstance(result, Tensor) else result
        values.update(zip(stage.outputs, results, strict=True))
    return {output.name: values[output.name] for output in model.outputs}
