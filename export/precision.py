"""From fp32 weights to a weight-only precision, and what it costs in agreement.

The quantised target is *the* target: its dequantised weights replace the originals in the PyTorch
modules, so that parity, the graphs and every engine speak of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pspec.calibrate.quantise import INT8, Floats, Quantised, Scheme, quantise
from pspec.errors import PspecError
from pspec.export.weights import stored_bytes
from pspec.models.decoder import Decoder, TargetGraph
from pspec.models.graph import GraphModel, Stage, run_graph
from pspec.models.layers import Linear
from pspec.models.self_text import read_feeds, write_text

Advance = Callable[[int, int], None]
Floats64 = NDArray[np.float64]
Moments = dict[str, Floats64]


@dataclass(frozen=True)
class Precision:
    """How the weights of a bundle are stored.

    Attributes:
        layers: of the linear layers.
        head: of the head, whose errors no later layer evens out.
        agreement: share of most likely tokens that must be those of fp32.
    """

    layers: Scheme
    head: Scheme
    agreement: float


PRECISIONS: dict[str, Precision] = {
    "int8": Precision(INT8, INT8, 0.9),
    "int4": Precision(Scheme(4, 32), INT8, 0.6),
}

_CALIBRATION_ROWS, _HELD_OUT_ROWS, _LENGTH = 16, 8, 160
_SEED = 20260
_HEAD_STRIDE = 4
"""Every so many positions give the head an input: all of them would fill memory with logits."""


class LayerError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What quantising one weight does to its layer's output on text.

    Attributes:
        name: the weight.
        error: root mean square of the change over that of the output.
        bytes: stored, scales included.
    """

    name: str
    error: float
    bytes: int


class PrecisionReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agreement of a quantised target with its fp32 original on text it wrote itself.

    Attributes:
        precision: ``int8`` or ``int4``.
        tokens: held-out positions compared.
        kl: mean KL divergence of the next-token distributions, in nats.
        top1: share of positions whose most likely token is the same.
        weight_bytes: of the quantised weights as stored.
        float_bytes: of the same weights in fp32.
        layers: every quantised weight, the most sensitive first.
    """

    precision: str
    tokens: int
    kl: float
    top1: float
    weight_bytes: int
    float_bytes: int
    layers: tuple[LayerError, ...]


@dataclass(frozen=True)
class _Text:
    calibration: Tensor
    held_out: Tensor


def quantise_target(
    decoder: Decoder, opening: Sequence[int], name: str, advance: Advance
) -> tuple[dict[str, Quantised], PrecisionReport]:
    """Quantise every linear layer of an untied target in place; its embedding stays as it is.

    Layer follows layer: each is fitted to inputs that the quantised layers before it produce.

    Args:
        decoder: its weights become the dequantised ones.
        opening: token ids with which the target begins to write its own text.
        name: a key of :data:`PRECISIONS`.
        advance: hears of work done and of all work.

    Returns:
        The stored form of each weight by its name in the weight file, and the report.
    """
    model, precision = TargetGraph(decoder, positions=_LENGTH), PRECISIONS[name]
    total = _LENGTH + len(model.stages) + 2
    text = _write(decoder, opening, lambda done: advance(done, total))
    wanted = _distributions(model, text.held_out)
    stored: dict[str, Quantised] = {}
    layers: list[LayerError] = []
    stride = torch.arange(0, _LENGTH, _HEAD_STRIDE)
    values = read_feeds(model, text.calibration, stride)
    for number, stage in enumerate(model.stages, start=1):
        scheme = precision.head if stage.kind == "head" else precision.layers
        for key, weight, error in _quantise_stage(stage, values, scheme):
            stored[key] = weight
            layers.append(LayerError(key, error, stored_bytes(weight)))
        advance(_LENGTH + number, total)
    got = _distributions(model, text.held_out)
    advance(total, total)
    return stored, _report(name, wanted, got, stored, layers)


@torch.no_grad()
def quantise_nearest(
    model: GraphModel, scheme: Scheme, done: Mapping[str, Quantised]
) -> dict[str, Quantised]:
    """Quantise the linear layers of a drafter in place, but those it shares with its target.

    It sees no text here: what rounding costs it is speed, never a token.
    """
    stored: dict[str, Quantised] = {}
    for stage in model.stages:
        for name, linear in _linears(stage):
            if name not in done:
                stored[name] = quantise(name, np.ascontiguousarray(linear.weight.numpy()), scheme)
                weight = torch.from_numpy(stored[name].dequantise())
                linear.weight = nn.Parameter(weight, requires_grad=False)
    return stored


def untie_head(decoder: Decoder) -> None:
    """Give a tied head a table of its own: the embedding stays float, the head is quantised."""
    if decoder.lm_head is None:
        vocab, hidden = decoder.embed_tokens.weight.shape
        decoder.lm_head = Linear(hidden, vocab).requires_grad_(False)
        decoder.lm_head.weight = nn.Parameter(decoder.embed_tokens.weight.t(), requires_grad=False)
        decoder.config = msgspec.structs.replace(decoder.config, tied_head=False)


@torch.no_grad()
def restore_weights(models: Iterable[GraphModel], stored: Mapping[str, Quantised]) -> None:
    """Put the dequantised weights of an interrupted export back into freshly loaded models."""
    for model in models:
        for stage in model.stages:
            for name, linear in _linears(stage):
                weight = torch.from_numpy(stored[name].dequantise())
                linear.weight = nn.Parameter(weight, requires_grad=False)


def check_agreement(report: PrecisionReport, least: float) -> None:
    """The gate.

    Raises:
        PspecError: when too few most likely tokens are those of the fp32 target.
    """
    if not report.top1 >= least:
        worst = ", ".join(layer.name for layer in report.layers[:3])
        raise PspecError(
            f"{report.precision} agrees with fp32 on {report.top1:.1%} of {report.tokens} tokens, "
            f"below --min-agreement {least:.0%} (most sensitive: {worst}); use a higher precision"
        )


def _write(decoder: Decoder, opening: Sequence[int], advance: Callable[[int], None]) -> _Text:
    rows = _CALIBRATION_ROWS + _HELD_OUT_ROWS
    ids = write_text(decoder, opening, rows=rows, length=_LENGTH, seed=_SEED, advance=advance)
    return _Text(ids[:_CALIBRATION_ROWS], ids[_CALIBRATION_ROWS:])


@torch.no_grad()
def _quantise_stage(
    stage: Stage, values: dict[str, Tensor], scheme: Scheme
) -> Iterator[tuple[str, Quantised, float]]:
    """Quantise one stage on its inputs in ``values``, and add its outputs to them."""
    linears = list(_linears(stage))
    moments: Moments = {name: np.zeros((len(linear.weight),) * 2) for name, linear in linears}
    inputs = [values[name] for name in stage.inputs]
    with _Watch(linears, moments):
        stage.module(*inputs)
    for name, linear in linears:
        original = np.ascontiguousarray(linear.weight.numpy())
        weight = quantise(name, original, scheme, moments[name])
        linear.weight = nn.Parameter(torch.from_numpy(weight.dequantise()), requires_grad=False)
        error = weight.dequantise().astype(np.float64) - original
        yield name, weight, _relative(error, original, moments[name])
    result = stage.module(*inputs)
    results = (result,) if isinstance(result, Tensor) else result
    values.update(zip(stage.outputs, results, strict=True))


class _Watch:
    """Adds up ``X^T X`` of the inputs of linear layers while a module runs."""

    def __init__(self, linears: Sequence[tuple[str, Linear]], moments: Moments) -> None:
        self._linears = linears
        self._moments = moments

    def __enter__(self) -> None:
        self._hooks = [
            linear.register_forward_hook(self._add(name)) for name, linear in self._linears
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            self._moments[name] += (rows.T @ rows).double().numpy()

        return hook


def _linears(stage: Stage) -> Iterator[tuple[str, Linear]]:
    """Linear layers of a stage by their weight's name in the weight file."""
    for path, module in stage.module.named_modules():
        if isinstance(module, Linear):
            yield stage.weights[f"{path}.weight" if path else "weight"], module


@torch.inference_mode()
def _distributions(model: TargetGraph, ids: Tensor) -> list[Tensor]:
    """Log-probabilities ``[length, V]`` of every row."""
    everything = torch.arange(ids.shape[1])
    logits = (run_graph(model, read_feeds(model, row[None], everything))["logits"] for row in ids)
    return [torch.log_softmax(each[0], dim=-1) for each in logits]


def _relative(error: Floats64, weight: Floats, moment: Floats64) -> float:
    """Root mean square of ``X @ error`` over that of ``X @ weight``, out of ``X^T X``."""
    lost = float((error * (moment @ error)).sum())
    whole = float((weight * (moment @ weight)).sum())
    return (lost / whole) ** 0.5 if whole > 0 else 0.0


def _report(
    precision: str,
    wanted: Sequence[Tensor],
    got: Sequence[Tensor],
    stored: Mapping[str, Quantised],
    layers: Sequence[LayerError],
) -> PrecisionReport:
    kl = [(w.exp() * (w - g)).sum(-1) for w, g in zip(wanted, got, strict=True)]
    same = [w.argmax(-1) == g.argmax(-1) for w, g in zip(wanted, got, strict=True)]
    return PrecisionReport(
        precision=precision,
        tokens=sum(len(row) for row in same),
        kl=float(torch.cat(kl).mean()),
        top1=float(torch.cat(same).float().mean()),
        weight_bytes=sum(layer.bytes for layer in layers),
        float_bytes=sum(4 * weight.integers.size for weight in stored.values()),
        layers=tuple(sorted(layers, key=lambda layer: -layer.error)),
    )
