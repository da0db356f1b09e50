"""A drafter directory: ``config.json`` and ``model.safetensors``, nothing in either left unread.

Linear weights are stored ``[out, in]``, as everywhere in the Hugging Face world.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pspec.errors import CheckpointError, ConfigError
from pspec.files import replaced_folder
from pspec.models.config import TargetConfig
from pspec.models.drafter import Drafter
from pspec.models.drafter_config import DrafterConfig, check_drafter
from pspec.models.layers import linear_weights

CONFIG_FILE = "config.json"
WEIGHT_FILE = "model.safetensors"


def write_drafter(drafter: Drafter, folder: Path) -> None:
    """Write a drafter directory; an existing one is replaced as a whole.

    Raises:
        CheckpointError: when the folder cannot be written.
    """
    turned = linear_weights(drafter)
    tensors = {
        name: (tensor.T if name in turned else tensor).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with replaced_folder(folder) as fresh:
        save_file(tensors, fresh / WEIGHT_FILE, metadata={"format": "pt"})
        text = msgspec.json.format(msgspec.json.encode(drafter.config), indent=2)
        (fresh / CONFIG_FILE).write_bytes(text + b"\n")


def read_drafter_config(folder: Path) -> DrafterConfig:
    """Read and check ``config.json``.

    Raises:
        CheckpointError: when there is none.
        ConfigError: for anything in it that is unknown, missing or contradictory.
    """
    path = folder / CONFIG_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no drafter directory: no readable {path.name}"
        ) from error
    try:
        return check_drafter(msgspec.json.decode(data, type=DrafterConfig))
    except msgspec.DecodeError as error:
        raise ConfigError(f"drafter {path}: {error}") from error


def read_drafter(folder: Path) -> Drafter:
    """Load a drafter directory, fp32 and frozen.

    Raises:
        CheckpointError: for a missing, left over, damaged or misshapen tensor, by name.
    """
    drafter = Drafter(read_drafter_config(folder))
    turned = linear_weights(drafter)
    wanted = drafter.state_dict()
    found = _read_tensors(folder / WEIGHT_FILE)
    for name in sorted(found.keys() - wanted.keys()):
        raise CheckpointError(f"drafter {folder}: {WEIGHT_FILE} holds {name}, which nothing uses")
    for name in sorted(wanted.keys() - found.keys()):
        raise CheckpointError(f"drafter {folder}: {WEIGHT_FILE} lacks {name}")
    for name, own in wanted.items():
        tensor = found[name].T if name in turned else found[name]
        if tensor.shape != own.shape:
            expected = list(reversed(own.shape)) if name in turned else list(own.shape)
            raise CheckpointError(
                f"drafter {folder}: {name} has shape {list(found[name].shape)}, expected {expected}"
            )
        with torch.no_grad():
            own.copy_(tensor)
    _check_map(drafter, folder)
    return drafter.eval().requires_grad_(False)


def check_match(config: DrafterConfig, target: TargetConfig, folder: Path) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        ConfigError: naming the field and both numbers.
    """
    pairs = [
        ("target_vocab_size", config.target_vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.block.hidden_size),
    ]
    for name, own, theirs in pairs:
        if own != theirs:
            raise ConfigError(f"drafter {folder}: {name} is {own}, the target has {theirs}")
    if isinstance(config.features, tuple):
        for boundary in config.features:
            if not 0 <= boundary <= target.num_layers:
                raise ConfigError(
                    f"drafter {folder}: feature boundary {boundary} is not in "
                    f"0..{target.num_layers}, the target's range"
                )


def drafter_fingerprint(folder: Path) -> str:
    """Hash of everything that a drafter directory computes with."""
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    digest.update((folder / WEIGHT_FILE).read_bytes())
    return digest.hexdigest()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_map(drafter: Drafter, folder: Path) -> None:
    if drafter.d2t is None:
        return
    ids, vocab = drafter.d2t, drafter.config.target_vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise CheckpointError(f"drafter {folder}: d2t names a token outside 0..{vocab - 1}")
    if ids.unique().numel() != ids.numel():
        raise CheckpointError(f"drafter {folder}: d2t names a token twice")
