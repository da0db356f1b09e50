"""The one weight file of a bundle: every tensor once, at a 64-byte boundary, bit for bit.

Tensors are streamed to disk one at a time; equal tensors (a shared embedding, equal rotary tables)
are stored once and known under each of their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor

from pspec.calibrate.quantise import Quantised, Scheme
from pspec.runtime.manifest import StoredTensor

WEIGHT_FILE = "weights.data"
_ALIGNMENT = 64
_QUANTISED, _SCALE = ".quantised", ".scale"
"""Endings of the two tensors that a quantised weight is stored as."""

Weight = Tensor | Quantised


def write_weights(
    tensors: Iterable[tuple[str, Weight]],
    folder: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> list[StoredTensor]:
    """Write named tensors to ``folder/weights.data``; ``advance`` hears of bytes written.

    A quantised weight is stored as two tensors, ``NAME.quantised`` and ``NAME.scale``.
    """
    stored: dict[str, StoredTensor] = {}
    seen: dict[str, StoredTensor] = {}
    with (folder / WEIGHT_FILE).open("wb") as file:
        for name, dtype, shape, data in _arrays(tensors):
            digest = f"{dtype}{shape}{hashlib.sha256(data.data).hexdigest()}"
            twin = seen.get(digest)
            if twin is None:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                entry = StoredTensor(name, dtype, shape, file.tell(), data.nbytes)
                file.write(data.data)
                seen[digest] = entry
                advance(data.nbytes)
            else:
                entry = StoredTensor(name, twin.dtype, twin.shape, twin.offset, twin.bytes)
            if stored.setdefault(name, entry) != entry:
                raise ValueError(f"two different tensors are called {name}")
    return list(stored.values())


def stored_bytes(weight: Weight) -> int:
    """Bytes of a weight in the file, padding apart."""
    if isinstance(weight, Tensor):
        return weight.nbytes
    return -(-weight.integers.size * weight.scheme.bits // 8) + weight.scales.nbytes


def _arrays(
    tensors: Iterable[tuple[str, Weight]],
) -> Iterable[tuple[str, str, tuple[int, ...], NDArray[Any]]]:
    """Name, type, shape and contiguous data of everything that is stored."""
    for name, weight in tensors:
        if isinstance(weight, Tensor):
            data = np.ascontiguousarray(weight.detach().numpy())
            yield name, str(data.dtype), data.shape, data
            continue
        integers, scales = weight.integers, weight.scales
        packed: NDArray[Any] = pack_int4(integers) if weight.scheme.bits == 4 else integers
        yield f"{name}{_QUANTISED}", f"int{weight.scheme.bits}", integers.shape, packed
        yield f"{name}{_SCALE}", str(scales.dtype), scales.shape, scales


def pack_int4(integers: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Two to a byte in row-major order, the first in the low half (ONNX's INT4 layout)."""
    flat: NDArray[Any] = integers.reshape(-1).view(np.uint8) & 0xF
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: NDArray[np.uint8] = flat[0::2] | (flat[1::2] << 4)
    return packed


def unpack_int4(packed: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.int8]:
    """The integers that :func:`pack_int4` packed."""
    halves = np.stack((packed & 0xF, packed >> 4), axis=-1).reshape(-1).astype(np.int8)
    signed = np.where(halves > 7, halves - 16, halves).astype(np.int8)
    return signed[: int(np.prod(shape))].reshape(shape)


def external_tensors(stored: Iterable[StoredTensor], folder: Path) -> dict[str, ir.ExternalTensor]:
    """References into the weight file, for the initialisers of graphs in ``folder``."""
    return {
        tensor.name: ir.ExternalTensor(
            WEIGHT_FILE,
            offset=tensor.offset,
            length=tensor.bytes,
            dtype=_ir_type(tensor.dtype),
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            base_dir=folder,
        )
        for tensor in stored
    }


def read_quantised(stored: Iterable[StoredTensor], folder: Path) -> dict[str, Quantised]:
    """The quantised weights of a weight file, by the name of the weight."""
    data = np.memmap(folder / WEIGHT_FILE, np.uint8, "r")
    by_name = {tensor.name: tensor for tensor in stored}

    def bytes_of(tensor: StoredTensor) -> NDArray[np.uint8]:
        return np.array(data[tensor.offset : tensor.offset + tensor.bytes])

    found = {}
    for name, tensor in by_name.items():
        if not name.endswith(_QUANTISED):
            continue
        weight = name.removesuffix(_QUANTISED)
        scale = by_name[f"{weight}{_SCALE}"]
        raw = bytes_of(tensor)
        bits = 4 if tensor.dtype == "int4" else 8
        integers = unpack_int4(raw, tensor.shape) if bits == 4 else raw.view(np.int8)
        block = tensor.shape[0] // scale.shape[0] if len(scale.shape) == 2 else 0
        scales = bytes_of(scale).view(np.float32).reshape(scale.shape)
        found[weight] = Quantised(integers.reshape(tensor.shape), scales, Scheme(bits, block))
    return found


def _ir_type(name: str) -> ir.DataType:
    return ir.DataType.INT4 if name == "int4" else ir.DataType.from_numpy(np.dtype(name))


def unique_bytes(stored: Iterable[StoredTensor]) -> int:
    """Bytes of the distinct tensors."""
    return sum({tensor.offset: tensor.bytes for tensor in stored if tensor.bytes}.values())
