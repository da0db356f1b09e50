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
from pspec.files import disk_errors, replaced_folder, sha256_file
from pspec.models.config import TargetConfig
from pspec.models.drafter import Drafter
from pspec.models.drafter_config import DrafterConfig, check_drafter
from pspec.models.layers import linear_weights

CONFIG_FILE = "config.json"
WEIGHT_FILE = "model.safetensors"


def write_drafter(drafter: Drafter, folder: Path) -> None:
    """Write a drafter directory; an existing one is replaced as a whole.

    Raises:
        PspecError: when the folder cannot be written.
    """
    turned = linear_weights(drafter)
    tensors = {
        name: (tensor.T if name in turned else tensor).contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    with disk_errors(folder), replaced_folder(folder) as fresh:
        try:
            save_file(tensors, fresh / WEIGHT_FILE, metadata={"format": "pt"})
        except SafetensorError as error:  # it has no OSError inside
            raise CheckpointError(f"cannot write {folder / WEIGHT_FILE}: {error}") from error
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
        ConfigError: for anything in the config that is unknown, missing or contradictory.
    """
    config = read_drafter_config(folder)
    found = _read_tensors(folder / WEIGHT_FILE)
    drafter = _empty_drafter(config, folder, len(found))
    turned = linear_weights(drafter)
    wanted = drafter.state_dict()
    for name in sorted(found.keys() - wanted.keys()):
        raise CheckpointError(f"drafter {folder}: {WEIGHT_FILE} holds {name}, which nothing uses")
    for name in sorted(wanted.keys() - found.keys()):
        raise CheckpointError(f"drafter {folder}: {WEIGHT_FILE} lacks {name}")
    for name, own in wanted.items():
        shape = list(reversed(own.shape)) if name in turned else list(own.shape)
        fault = _fault(name, found[name], shape, config.target_vocab_size)
        if fault:
            raise CheckpointError(f"drafter {folder}: {name} {fault}")
        tensor = found.pop(name).to(own.dtype)
        wanted[name] = (tensor.T if name in turned else tensor).contiguous()
    drafter.load_state_dict(wanted, assign=True)
    return drafter.eval().requires_grad_(False)


def _empty_drafter(config: DrafterConfig, folder: Path, tensors: int) -> Drafter:
    """A drafter without memory, for the file may not hold what the config says."""
    if config.num_layers > max(tensors, 1):  # making the modules would take as long as it is large
        raise CheckpointError(
            f"drafter {folder}: num_layers is {config.num_layers}, but {WEIGHT_FILE} holds "
            f"{tensors} tensors in all"
        )
    try:
        with torch.device("meta"):
            return Drafter(config)
    except (RuntimeError, TypeError) as error:  # bytes beyond 64 bits
        raise CheckpointError(f"drafter {folder}: its config asks for impossible sizes") from error


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
    hashes = [sha256_file(folder / name) for name in (CONFIG_FILE, WEIGHT_FILE)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _fault(name: str, tensor: Tensor, shape: list[int], vocab: int) -> str:
    """What is wrong with a tensor of the file; empty where nothing is."""
    if list(tensor.shape) != shape:
        return f"has shape {list(tensor.shape)}, expected {shape}"
    if name == "d2t":
        return _map_fault(tensor, vocab)
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"is {tensor.dtype}, expected float32, float16 or bfloat16"
    return "" if tensor.isfinite().all() else "holds a number that is not finite"


def _map_fault(ids: Tensor, vocab: int) -> str:
    if ids.dtype not in (torch.int32, torch.int64):
        return f"is {ids.dtype}, expected int32 or int64"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        return f"names a token outside 0..{vocab - 1}"
    return "" if ids.unique().numel() == ids.numel() else "names a token twice"
