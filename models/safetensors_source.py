"""Tensors of a Hugging Face folder, read from its safetensors files a block at a time.

The files are read, not mapped: mapped pages would count as the process's memory until the end, and
a bf16 checkpoint would cost half its fp32 size on top.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pspec.errors import CheckpointError
from pspec.models.weights import row_blocks

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: bytes from ``begin`` of ``path``."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class SafetensorsSource:
    """A :class:`~pspec.models.weights.TensorSource` over a folder's weight files.

    Raises:
        CheckpointError: a file is missing, damaged, or disagrees with the index or another file.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        weight_map = _read_index(index) if index.is_file() else {}
        self.files = _weight_files(folder, weight_map)
        self._entries: dict[str, _Entry] = {}
        for path in self.files:
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    other = self._entries[name].path.name
                    raise CheckpointError(f"{path}: {name} is also in {other}; keep one of the two")
                self._entries[name] = entry
        for name, file in weight_map.items():
            if name not in self._entries or self._entries[name].path.name != file:
                raise CheckpointError(f"{index}: {name} is not in {file}, where the index puts it")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def place(self, name: str) -> str:
        """The file that holds a tensor."""
        return str(self._entries[name].path)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor in its own type, as blocks of consecutive rows."""
        entry = self._entries[name]
        row_bytes = prod(entry.shape[1:]) * entry.dtype.itemsize
        with entry.path.open("rb") as file:
            file.seek(entry.begin)
            for start, stop in row_blocks(entry.shape):
                data = bytearray((stop - start) * row_bytes)
                if file.readinto(data) != len(data):
                    raise CheckpointError(f"{entry.path}: cut short in {name}; download it again")
                block = torch.frombuffer(data, dtype=entry.dtype)
                yield block.view(stop - start, *entry.shape[1:])


def _weight_files(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    """The files to read; an index decides when there is one, and strays are left alone."""
    names = sorted(set(weight_map.values())) or [SINGLE]
    if not weight_map and not (folder / SINGLE).is_file():
        raise CheckpointError(_no_weights_message(folder))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX}: {name!r} is not the name of a file beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, but {INDEX} names it; download it")
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in names)
    if strays:
        logger.warning("%s: ignoring %s, not part of the checkpoint", folder, ", ".join(strays))
    return [folder / name for name in names]


def _no_weights_message(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin*")) or any(folder.glob("*.pth")):
        return (
            f"{folder}: pickled weights are not read; convert them with "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    if (folder / "adapter_config.json").is_file():
        return f"{folder}: an adapter alone; merge it into its base model and save that"
    return f"{folder}: neither {SINGLE} nor {INDEX}; expected a Hugging Face checkpoint"


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("weight_map is empty or malformed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an index of weights ({error})") from error
    return dict(weight_map)


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            if not isinstance(header, dict):
                raise ValueError("its header is not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({error}); download it again"
        ) from error
    header.pop("__metadata__", None)
    return _entries(path, header, start=8 + length, size=size)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return result


def _entries(path: Path, header: Mapping[str, Any], start: int, size: int) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    last = start
    for name, item in header.items():
        try:
            kind, shape = item["dtype"], tuple(int(n) for n in item["shape"])
            begin, end = (start + int(offset) for offset in item["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: the header entry of {name} is malformed") from error
        if kind not in _DTYPES:
            raise CheckpointError(
                f"{path}: {name} has type {kind}; supported: {', '.join(_DTYPES)}. Quantised "
                "checkpoints are not read: use the original"
            )
        if end - begin != prod(shape) * _DTYPES[kind].itemsize or begin < start:
            raise CheckpointError(f"{path}: the header entry of {name} contradicts its shape")
        entries[name] = _Entry(path, _DTYPES[kind], shape, begin)
        last = max(last, end)
    if last != size:
        raise CheckpointError(
            f"{path}: {size} bytes, but its header describes {last}; download it again"
        )
    return entries
