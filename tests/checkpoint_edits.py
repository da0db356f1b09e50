"""Change a saved checkpoint, and see that it is read or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from pspec.errors import PspecError
from pspec.models.checkpoint import LoadedTarget, load_target


def save_sharded(model: PreTrainedModel, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="80KB")
    assert (folder / "model.safetensors.index.json").is_file()


def same_weights(one: LoadedTarget, other: LoadedTarget) -> bool:
    a, b = one.decoder.state_dict(), other.decoder.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def put(name: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: value}))


def refused(source: Path | str, error: type[PspecError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_target(str(source))
    assert "\n" not in str(caught.value)
