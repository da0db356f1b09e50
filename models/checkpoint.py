"""Loading a target: a Hugging Face folder, a GGUF file or a hub id, to a decoder in fp32."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pspec.errors import CheckpointError, ConfigError
from pspec.files import expand_user
from pspec.models.config import TargetConfig
from pspec.models.decoder import Decoder
from pspec.models.families import resolve_target
from pspec.models.family_parts import check_token_ids
from pspec.models.gguf_source import GgufSource
from pspec.models.safetensors_source import SafetensorsSource
from pspec.models.text_files import TextFiles, convert_text_files, read_object, read_text_files
from pspec.models.weights import TensorSource, load_decoder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class LoadedTarget:
    """A target, ready to be exported.

    Attributes:
        decoder: fp32, eval mode, no gradients.
        config: what the decoder was built from; its EOS ids are the union of what the config, the
            generation settings and the tokenizer name.
        text: tokenizer, chat template and generation settings.
        source: what was asked for.
        fingerprint: SHA-256 over the config and the weights, the same wherever they lie.
    """

    decoder: Decoder
    config: TargetConfig
    text: TextFiles
    source: str
    fingerprint: str

    def save_text_files(self, destination: Path) -> None:
        """Write what a bundle needs to chat without this checkpoint into an existing folder.

        That is ``tokenizer.json`` and, where the checkpoint has them, ``chat_template.jinja`` and
        ``generation_config.json``; also ``special_tokens.json`` if the template names such tokens.
        """
        self.text.save(destination)


def load_target(source: str, *, cache_dir: Path | None = None) -> LoadedTarget:
    """Load a target model.

    Args:
        source: a Hugging Face folder with safetensors, a ``.gguf`` file, or a hub id.
        cache_dir: where a hub checkpoint is kept; by default the hub's own cache.

    Raises:
        ConfigError: a config that this version cannot express.
        CheckpointError: files that are missing, damaged or do not fit the config.
    """
    path = expand_user(source)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _load_gguf(path, source)
    if path.is_dir():
        return _load_folder(path, source)
    if path.exists():
        raise CheckpointError(f"{source}: expected a folder, a .gguf file or a hub id")
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source}: no such folder or file, and not a hub id like owner/name")
    return _load_folder(_download(source, cache_dir), source)


def _load_folder(folder: Path, source: str) -> LoadedTarget:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(_no_config_message(folder))
    try:
        config = resolve_target(read_object(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    text = read_text_files(folder)
    config = _with_text(config, text, source)
    weights = SafetensorsSource(folder)
    return _loaded(config, weights, text, source, [path, *weights.files])


def _load_gguf(path: Path, source: str) -> LoadedTarget:
    weights = GgufSource(path)
    try:
        config = resolve_target(weights.config())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    text = convert_text_files(path)
    return _loaded(_with_text(config, text, source), weights, text, source, [path])


def _loaded(
    config: TargetConfig, weights: TensorSource, text: TextFiles, source: str, files: list[Path]
) -> LoadedTarget:
    decoder = load_decoder(config, weights)
    return LoadedTarget(decoder, decoder.config, text, source, _fingerprint(files))


def _with_text(config: TargetConfig, text: TextFiles, source: str) -> TargetConfig:
    """Add the special tokens that the text files name, and check that ids and rows agree."""
    try:
        text.check_vocabulary(config.vocab_size)
        named = (config.bos_token_id, *text.generation_ids("bos_token_id"))
        starts = (*named, text.special_id("bos_token"))
        ends = {*config.eos_token_ids, *text.generation_ids("eos_token_id")}
        ends |= {token for token in [text.special_id("eos_token")] if token is not None}
        bos = next((token for token in starts if token is not None), None)
        return check_token_ids(replace(config, bos_token_id=bos, eos_token_ids=tuple(sorted(ends))))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _no_config_message(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        return f"{folder}: no config.json; to load a GGUF model name its file, such as {files[0]}"
    return f"{folder}: no config.json; expected a Hugging Face checkpoint"


def _fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over the SHA-256 of each file, in the given order."""
    total = hashlib.sha256()
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        total.update(digest.digest())
    return total.hexdigest()


def _download(repository: str, cache_dir: Path | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{repository}: no such folder, and the hub needs: pip install 'pspec-toolkit[export]'"
        ) from error
    try:
        return Path(
            snapshot_download(
                repository,
                cache_dir=cache_dir,
                allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    # Offline, gated, misspelt, out of space: each has its own error there, most of many lines.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repository}: no such folder, and the hub did not provide it ({reason}); check the "
            "name, log in with 'hf auth login' if it is gated, or download it elsewhere and pass "
            "the folder"
        ) from error
