"""Weights as integers and scales, against loops and against what ONNX itself reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from pspec.calibrate.quantise import INT8, Quantised, Scheme, find_scales, quantise
from pspec.errors import ConfigError
from pspec.export.weights import (
    Weight,
    external_tensors,
    pack_int4,
    read_quantised,
    unpack_int4,
    write_weights,
)

Array = NDArray[Any]
SCHEMES = {"int8": INT8, **{f"int4 of {block}": Scheme(4, block) for block in (32, 64, 128)}}
ROWS, COLUMNS = 256, 530  # more columns than are quantised at a time
TINY = float(np.finfo(np.float32).tiny)


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return SCHEMES[request.param]


def signs(rows: int, columns: int, seed: int = 0) -> Array:
    """Every weight plus or minus its column's size, sizes from e^-2 to e^2: no bits are lost."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(np.linspace(-2, 2, columns)).astype(np.float32)
    chosen: Array = rng.choice(np.array([-1, 1], np.float32), (rows, columns)) * sizes
    return chosen


def noise(rows: int, columns: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def inputs(rows: int, columns: int, seed: int = 1) -> Array:
    """Correlated, of unlike sizes, as the inputs of real layers are."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((rows, columns // 4)) @ rng.standard_normal((columns // 4, columns))
    sizes = np.exp(rng.uniform(-2, 2, columns))
    found: Array = (mixed + 0.3 * rng.standard_normal((rows, columns))) * sizes
    return found


def moment(x: Array) -> NDArray[np.float64]:
    found: NDArray[np.float64] = x.T @ x
    return found


def read_back(stored: Quantised) -> Array:
    """Row by row: integers times the scales of their columns, or of the block the row is in."""
    rows, columns = stored.integers.shape
    whole = np.empty((rows, columns), np.float32)
    for row in range(rows):
        block = row // stored.scheme.block if stored.scheme.block else None
        scales = stored.scales if block is None else stored.scales[block]
        whole[row] = stored.integers[row].astype(np.float32) * scales
    return whole


def nearest(weight: Array, scheme: Scheme) -> Array:
    """The plain rule: the largest weight of a block gets the largest integer."""
    rows, columns = weight.shape
    whole, step = np.empty_like(weight), scheme.block or rows
    for start in range(0, rows, step):
        for column in range(columns):
            part = weight[start : start + step, column]
            scale = np.abs(part).max() / (127 if scheme.bits == 8 else 7)
            whole[start : start + step, column] = np.rint(part / scale) * scale
    return whole


# Exactness and range


@pytest.mark.parametrize("fitted", [False, True])
def test_weights_of_one_size_a_column_are_kept_exactly(scheme: Scheme, fitted: bool) -> None:
    weight = signs(ROWS, COLUMNS)
    known = moment(inputs(300, ROWS)) if fitted else None

    stored = quantise("w", weight, scheme, known)

    np.testing.assert_array_equal(
        stored.integers, np.sign(weight) * (127 if scheme.bits == 8 else 7)
    )
    # The correction of rows that have no error adds a rounding here and there.
    np.testing.assert_allclose(read_back(stored), weight, rtol=5e-4 if fitted else 1e-6)
    np.testing.assert_array_equal(stored.dequantise(), read_back(stored))


def test_integers_scales_and_their_shapes(scheme: Scheme) -> None:
    stored = quantise("w", noise(ROWS, COLUMNS), scheme, moment(inputs(300, ROWS)))

    least, largest = (-127, 127) if scheme.bits == 8 else (-8, 7)
    assert stored.integers.dtype == np.int8
    assert stored.integers.shape == (ROWS, COLUMNS)
    assert stored.integers.min() >= least
    assert stored.integers.max() <= largest
    assert stored.scales.dtype == np.float32
    assert stored.scales.shape == (
        (COLUMNS,) if scheme.bits == 8 else (ROWS // scheme.block, COLUMNS)
    )


ODD_COLUMNS: dict[str, Array] = {
    "zero": np.zeros(ROWS),
    "subnormal": np.full(ROWS, 1e-42),
    "barely normal": np.where(np.arange(ROWS) % 2, 130 * TINY, -TINY),
    "one weight": np.where(np.arange(ROWS) == 77, 0.3, 0),
    "an outlier": np.where(np.arange(ROWS) == 77, 1e30, noise(1, ROWS)[0]),
    "the largest": np.where(np.arange(ROWS) % 3, 1e37, -1e37),
    "zeros in one block": np.where(np.arange(ROWS) < 128, 0, noise(1, ROWS)[0]),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("fitted", [False, True])
def test_scales_are_positive_and_finite_whatever_the_column(scheme: Scheme, fitted: bool) -> None:
    weight = np.stack([*ODD_COLUMNS.values(), noise(1, ROWS)[0]], axis=1).astype(np.float32)

    stored = quantise("w", weight, scheme, moment(inputs(300, ROWS)) if fitted else None)

    assert np.isfinite(stored.scales).all()
    assert (stored.scales >= 0.5 * TINY).all()
    back = read_back(stored)
    assert np.isfinite(back).all()
    names = [*ODD_COLUMNS, "usual"]
    assert not back[:, names.index("zero")].any()
    if fitted:  # errors wander on to other rows
        return
    for index, name in enumerate(names):
        column = weight[:, index].astype(np.float64)
        apart = np.abs(back[:, index] - column).max()
        assert apart <= max(np.abs(column).max() / (3 if scheme.bits == 4 else 250), TINY), name
        assert name != "usual" or apart > 0


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_columns_of_any_size_are_quantised_alike(scheme: Scheme, size: float) -> None:
    weight = noise(ROWS, 20)
    power = np.float32(2.0 ** round(np.log2(size)))

    plain, sized = quantise("w", weight, scheme), quantise("w", weight * power, scheme)

    np.testing.assert_array_equal(sized.integers, plain.integers)
    np.testing.assert_array_equal(sized.scales, plain.scales * power)


def test_columns_know_nothing_of_each_other(scheme: Scheme) -> None:
    weight, known = noise(ROWS, COLUMNS), moment(inputs(300, ROWS))

    whole = quantise("w", weight, scheme, known)
    some = quantise("w", weight[:, 505:520], scheme, known)

    assert (whole.integers[:, 505:520] != some.integers).mean() < 1e-3  # sums in another order
    np.testing.assert_allclose(whole.scales[..., 505:520], some.scales, rtol=1e-6)


@pytest.mark.parametrize("columns", [7, COLUMNS])
@pytest.mark.parametrize("fitted", [False, True])
def test_the_weight_itself_stays_as_it_is(columns: int, fitted: bool) -> None:
    weight = noise(ROWS, columns)
    before = weight.copy()

    quantise("w", weight, Scheme(4, 32), moment(inputs(300, ROWS)) if fitted else None)

    np.testing.assert_array_equal(weight, before)


# Better than nearest


def test_searched_scales_lose_no_more_than_the_plain_rule(scheme: Scheme) -> None:
    weight = noise(ROWS, 40)
    weight[::50] *= 4  # outliers, for which a block had better give up some range

    found = quantise("w", weight, scheme)

    step = scheme.block or ROWS
    lost, plain = (
        np.square(whole - weight).reshape(-1, step, 40).sum(axis=1, dtype=np.float64)
        for whole in (read_back(found), nearest(weight, scheme))
    )
    assert (lost <= plain * (1 + 1e-6)).all()
    if scheme.bits == 4:
        assert lost.sum() < 0.95 * plain.sum()


def test_importance_shifts_the_error_to_rows_that_matter_less() -> None:
    blocks = noise(32, 200)[None]
    importance = np.where(np.arange(32) < 4, 100, 0.01).astype(np.float32)[:, None]

    def lost(scales: Array) -> float:
        back = np.clip(np.rint(blocks / scales[:, None]), -8, 7) * scales[:, None]
        return float((np.square(blocks - back) * importance).sum())

    scheme = Scheme(4, 32)
    assert lost(find_scales(blocks, scheme, importance)) < 0.9 * lost(find_scales(blocks, scheme))


@pytest.mark.parametrize("samples", [64, 1000], ids=["fewer than inputs", "many"])
def test_knowing_the_inputs_leaves_less_error_in_the_output(scheme: Scheme, samples: int) -> None:
    weight, x = noise(ROWS, 40), inputs(samples, ROWS)

    def lost(stored: Quantised) -> float:
        return float(np.square(x @ (read_back(stored) - weight)).sum())

    plain, fitted = quantise("w", weight, scheme), quantise("w", weight, scheme, moment(x))

    assert lost(fitted) < 0.6 * lost(plain)


@pytest.mark.parametrize("dead", [slice(10, 40), slice(None)], ids=["some", "all"])
def test_inputs_that_are_always_zero_do_no_harm(scheme: Scheme, dead: slice) -> None:
    weight, x = noise(ROWS, 8), inputs(400, ROWS)
    x[:, dead] = 0

    back = quantise("w", weight, scheme, moment(x)).dequantise()

    assert np.abs(back - weight).max() < 3


# Refusals


@pytest.mark.parametrize(("rows", "block"), [(80, 32), (96, 64), (192, 128), (16, 32)])
def test_a_block_that_does_not_divide_is_refused_by_name(rows: int, block: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"layers\.3\.mlp\.down: {rows} inputs.*block of {block}"
    ):
        quantise("layers.3.mlp.down", noise(rows, 4), Scheme(4, block))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(scheme: Scheme, value: float) -> None:
    weight = noise(ROWS, 4)
    weight[200, 3] = value

    with pytest.raises(ConfigError, match="q_proj is not finite"):
        quantise("q_proj", weight, scheme)


# Bytes


SHAPES = [(1,), (1, 1), (3, 5), (2, 4), (7, 9), (16, 16), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_integers_are_those_that_onnx_reads(shape: tuple[int, ...]) -> None:
    integers = np.random.default_rng(4).integers(-8, 8, shape).astype(np.int8)
    if integers.size == 256:
        integers = (np.arange(256) % 16 - 8).astype(np.int8).reshape(shape)

    packed = pack_int4(integers)

    assert packed.nbytes == -(-integers.size // 2)
    np.testing.assert_array_equal(unpack_int4(packed, shape), integers)
    proto = onnx.TensorProto(data_type=onnx.TensorProto.INT4, dims=shape, raw_data=packed.tobytes())
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(proto).astype(np.int8), integers)


@pytest.mark.parametrize(("rows", "columns"), [(32, 1), (64, 7), (96, 5), (160, 3)])
@pytest.mark.parametrize("scheme", [INT8, Scheme(4, 32)], ids=["int8", "int4"])
def test_the_weight_file_gives_back_what_was_stored(
    rows: int, columns: int, scheme: Scheme, tmp_path: Path
) -> None:
    stored = quantise("a.weight", noise(rows, columns), scheme)
    odd = Quantised(stored.integers[:, :1].copy(), stored.scales[..., :1].copy(), scheme)
    tensors: list[tuple[str, Weight]] = [
        ("a.weight", stored),
        ("b.bias", torch.ones(3)),
        ("c.weight", odd),
    ]

    entries = write_weights(tensors, tmp_path)

    back = read_quantised(entries, tmp_path)
    assert back.keys() == {"a.weight", "c.weight"}
    for name, weight in (("a.weight", stored), ("c.weight", odd)):
        np.testing.assert_array_equal(back[name].integers, weight.integers)
        np.testing.assert_array_equal(back[name].scales, weight.scales)
        assert back[name].scheme == scheme
    # The graphs' own view of the file, and ONNX's reading of that.
    views = external_tensors(entries, tmp_path)
    view = views["a.weight.quantised"]
    assert view.dtype == (ir.DataType.INT4 if scheme.bits == 4 else ir.DataType.INT8)
    np.testing.assert_array_equal(view.numpy().astype(np.int8), stored.integers)
    proto = ir.to_proto(ir.tensor(view.numpy(), dtype=view.dtype, name="a"))
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(proto), stored.integers)
    assert all(entry.offset % 64 == 0 for entry in entries)
