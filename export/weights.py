"""The one weight file of a bundle: every tensor once, at a 64-byte boundary, bit for bit.

Tensors are streamed to disk one at a time; equal tensors (a shared embedding, equal rotary tables)
are stored once and known under each of their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import Tensor

from pspec.runtime.manifest import StoredTensor

WEIGHT_FILE = "weights.data"
_ALIGNMENT = 64


def write_weights(
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> list[StoredTensor]:
    """Write named tensors to ``folder/weights.data``; ``advance`` hears of bytes written."""
    stored: dict[str, StoredTensor] = {}
    seen: dict[str, StoredTensor] = {}
    with (folder / WEIGHT_FILE).open("wb") as file:
        for name, tensor in tensors:
            data = np.ascontiguousarray(tensor.detach().numpy())
            digest = f"{data.dtype}{data.shape}{hashlib.sha256(data.data).hexdigest()}"
            twin = seen.get(digest)
            if twin is None:
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                entry = StoredTensor(name, str(data.dtype), data.shape, file.tell(), data.nbytes)
                file.write(data.data)
                seen[digest] = entry
                advance(data.nbytes)
            else:
                entry = StoredTensor(name, twin.dtype, twin.shape, twin.offset, twin.bytes)
            if stored.setdefault(name, entry) != entry:
                raise ValueError(f"two different tensors are called {name}")
    return list(stored.values())


def external_tensors(stored: Iterable[StoredTensor], folder: Path) -> dict[str, ir.ExternalTensor]:
    """References into the weight file, for the initialisers of graphs in ``folder``."""
    return {
        tensor.name: ir.ExternalTensor(
            WEIGHT_FILE,
            offset=tensor.offset,
            length=tensor.bytes,
            dtype=ir.DataType.from_numpy(np.dtype(tensor.dtype)),
            shape=ir.Shape(tensor.shape),
            name=tensor.name,
            base_dir=folder,
        )
        for tensor in stored
    }


def unique_bytes(stored: Iterable[StoredTensor]) -> int:
    """Bytes of the distinct tensors."""
    return sum({tensor.offset: tensor.bytes for tensor in stored if tensor.bytes}.values())
