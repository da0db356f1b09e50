"""Weight-only quantisation: symmetric integers, positive finite scales, better than nearest.

A weight ``[K, N]`` (``[in, out]``) becomes integers of its shape and one scale per column (int8) or
per block of a column's inputs (int4). What is stored is what ONNX's ``DequantizeLinear`` reads:
``weight = integer * scale``, no zero point.

Two steps improve on rounding to the nearest: the scale of each block is searched for the least
squared error, and, where the layer's inputs are known, the error of each row of inputs is made up
for by the rows that follow (GPTQ, Frantar et al. 2022).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pspec.errors import ConfigError

Floats = NDArray[np.float32]
Ints = NDArray[np.int8]

_SHARES = np.linspace(0.7, 1.0, 13, dtype=np.float32)
"""Scales tried, as shares of the one that reaches the largest weight."""
_DAMPING = 0.01
"""Share of the mean added to the diagonal of the inputs' second moment, as in GPTQ."""
_LAZY = 64
"""Rows whose corrections are applied to all later rows at once."""
_COLUMNS = 512
"""Columns quantised at a time: few enough to stay in a core's cache."""


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored.

    Attributes:
        bits: 8 or 4.
        block: inputs that share a scale; 0 is the whole column.
    """

    bits: int
    block: int

    @property
    def largest(self) -> int:
        """Largest integer."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def least(self) -> int:
        """Smallest integer: int8 kernels want no -128, int4 can't spare one level in sixteen."""
        return -8 if self.bits == 4 else -127


INT8 = Scheme(8, 0)
INT4 = Scheme(4, 32)


@dataclass(frozen=True)
class Quantised:
    """One stored weight.

    Attributes:
        integers: int8 ``[K, N]``, whatever the bits.
        scales: fp32 ``[K / block, N]``, or ``[N]`` for whole columns; positive and finite.
        scheme: how to read them.
    """

    integers: Ints
    scales: Floats
    scheme: Scheme

    def dequantise(self) -> Floats:
        """The weight that every graph and the reference compute with, fp32 ``[K, N]``."""
        rows = self.integers.shape[0]
        block = self.scheme.block or rows
        scales = self.scales.reshape(rows // block, 1, -1)
        blocks = self.integers.reshape(rows // block, block, -1) * scales
        return blocks.reshape(self.integers.shape)


def quantise(
    name: str, weight: Floats, scheme: Scheme, moment: NDArray[np.float64] | None = None
) -> Quantised:
    """Quantise one weight.

    Args:
        name: of the weight, for errors.
        weight: fp32 ``[K, N]``.
        scheme: bits and block.
        moment: ``X^T X [K, K]`` of the layer's inputs ``X``; without it, round to the nearest.

    Raises:
        ConfigError: for a weight that is not finite or that blocks do not divide.
    """
    rows, columns = weight.shape
    block = scheme.block or rows
    if rows % block:
        raise ConfigError(
            f"{name}: {rows} inputs are no multiple of a block of {block}: use another precision"
        )
    if not np.isfinite(weight).all():
        raise ConfigError(f"{name} is not finite: it cannot be quantised")
    factor = None if moment is None else _inverse_factor(moment)
    integers = np.empty((rows, columns), np.int8)
    scales = np.empty((rows // block, columns), np.float32)

    def fill(start: int) -> None:
        part = slice(start, start + _COLUMNS)
        work = weight[:, part].copy()  # its own: it is used up
        _fill(work, scheme, factor, integers[:, part], scales[:, part])

    # A pool of our own over columns: BLAS threads inside it would only wait for each other.
    with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, columns, _COLUMNS)))
    return Quantised(integers, scales if scheme.block else scales[0], scheme)


def _fill(
    work: Floats, scheme: Scheme, factor: Floats | None, integers: Ints, scales: Floats
) -> None:
    """Quantise some columns, which know nothing of each other; ``work`` is used up."""
    block = scheme.block or len(work)
    if factor is None:
        blocks = work.reshape(-1, block, work.shape[1])
        scales[:] = find_scales(blocks, scheme)
        integers[:] = _round(blocks, scales[:, None], scheme).reshape(work.shape)
        return
    importance = np.square(1 / factor.diagonal())[:, None]
    for start in range(0, len(work), _LAZY):
        stop = min(start + _LAZY, len(work))
        errors = np.empty((stop - start, work.shape[1]), np.float32)
        for row in range(start, stop):
            if row % block == 0:
                part = slice(row, row + block)
                scales[row // block] = find_scales(work[None, part], scheme, importance[part])[0]
            scale = scales[row // block]
            integers[row] = _round(work[row], scale, scheme)
            error = (work[row] - integers[row] * scale) / factor[row, row]
            work[row:stop] -= np.outer(factor[row, row:stop], error)
            errors[row - start] = error
        work[stop:] -= factor[start:stop, stop:].T @ errors


def find_scales(blocks: Floats, scheme: Scheme, importance: Floats | None = None) -> Floats:
    """The scale of least squared error of each column of each block.

    Args:
        blocks: ``[blocks, rows, columns]``.
        scheme: bits.
        importance: ``[rows, 1]``, of each row's error; all alike by default.

    Returns:
        ``[blocks, columns]``; 1 where a column is all zero.
    """
    reach = np.abs(blocks).max(axis=1) / scheme.largest
    # A subnormal scale would make its inverse infinite.
    reach[reach < np.finfo(np.float32).tiny] = 1.0
    best: Floats = reach.astype(np.float32)
    if scheme.bits == 8:
        return best
    least = np.full(reach.shape, np.inf, np.float32)
    units = blocks / reach[:, None]  # or squares of what is very large or small would be lost
    for share in _SHARES:
        error = np.square(units - _round(units, share, scheme) * share)
        error = (error if importance is None else error * importance).sum(axis=1)
        best = np.where(error < least, reach * share, best)
        least = np.minimum(error, least)
    return best


def _round(values: Floats, scales: Floats | np.float32, scheme: Scheme) -> Ints:
    rounded = np.rint(values / scales)
    integers: Ints = rounded.clip(scheme.least, scheme.largest, out=rounded).astype(np.int8)
    return integers


def _inverse_factor(moment: NDArray[np.float64]) -> Floats:
    """Upper Cholesky factor of the inverse of the damped moment ``[K, K]``."""
    damped = moment.astype(np.float64)
    diagonal = damped.diagonal().copy()
    diagonal[diagonal == 0] = 1.0  # an input that is always zero
    np.fill_diagonal(damped, diagonal + _DAMPING * diagonal.mean())
    factor: Floats = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)
    return factor
