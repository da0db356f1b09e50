"""The text side of a checkpoint: tokenizer, chat template and generation settings.

They are carried into a bundle as files, so that it can chat without its source. ``tokenizer.json``
goes as it is; a checkpoint without one, or a GGUF file, is converted through transformers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pspec.errors import CheckpointError, ConfigError
from pspec.models.hf_config import token_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextFiles:
    """Contents of the files that turn text to ids and back.

    Attributes:
        tokenizer: ``tokenizer.json``.
        vocabulary: every token, added ones included, to its id.
        special_tokens: names such as ``eos_token`` to the token's text.
        chat_template: Jinja source, if the model chats.
        generation_config: ``generation_config.json``, if there is one.
    """

    tokenizer: str
    vocabulary: Mapping[str, int] = field(repr=False)
    special_tokens: Mapping[str, str]
    chat_template: str | None = None
    generation_config: str | None = None

    def special_id(self, name: str) -> int | None:
        """Id of ``bos_token`` or the like, if the tokenizer has it."""
        return self.vocabulary.get(self.special_tokens.get(name, ""))

    def generation_ids(self, key: str) -> tuple[int, ...]:
        """Ids that ``generation_config.json`` gives under ``key``.

        Raises:
            ConfigError: something other than ids or null.
        """
        settings = json.loads(self.generation_config or "{}")
        return token_ids(settings.get(key), f"generation_config.json: {key}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a tokenizer with ids that the embedding of ``vocab_size`` rows does not have.

        Raises:
            ConfigError: naming both numbers.
        """
        token, largest = max(self.vocabulary.items(), key=lambda item: item[1], default=("", -1))
        if largest >= vocab_size:
            raise ConfigError(
                f"the tokenizer's id {largest} ({token!r}) is not below vocab_size {vocab_size}; "
                "use the tokenizer the model was saved with, or resize the embedding"
            )

    def save(self, destination: Path) -> None:
        """Write the files a bundle needs into an existing folder.

        ``special_tokens.json`` is written only for a template that names such tokens.
        """
        files = {
            "tokenizer.json": self.tokenizer,
            "chat_template.jinja": self.chat_template,
            "generation_config.json": self.generation_config,
        }
        if re.search(r"\b(bos|eos|pad|unk|sep|cls|mask)_token\b", self.chat_template or ""):
            files["special_tokens.json"] = json.dumps(dict(self.special_tokens), indent=2)
        for name, content in files.items():
            if content is not None:
                (destination / name).write_text(content, encoding="utf-8")


def read_text_files(folder: Path) -> TextFiles:
    """Text files of a Hugging Face folder.

    Raises:
        CheckpointError: no tokenizer, or a damaged file.
    """
    settings = read_object(folder / "tokenizer_config.json")
    special = {**read_object(folder / "special_tokens_map.json"), **settings}
    path = folder / "tokenizer.json"
    tokenizer = _read(path) if path.is_file() else _converted(folder, path)[0]
    generation = folder / "generation_config.json"
    read_object(generation)
    return TextFiles(
        tokenizer,
        _vocabulary(path, tokenizer),
        _special_tokens(special),
        _chat_template(folder, settings.get("chat_template")),
        _read(generation) if generation.is_file() else None,
    )


def convert_text_files(path: Path) -> TextFiles:
    """Text files of a ``.gguf`` file, which has no generation settings.

    Raises:
        CheckpointError: a tokenizer that transformers cannot convert.
    """
    # In a folder of its own: transformers would prefer tokenizer files that lie beside the model.
    with TemporaryDirectory() as folder:
        alone = Path(folder) / "model.gguf"
        alone.symlink_to(path.resolve())
        backend, special, template = _converted(alone.parent, path, gguf_file=alone.name)
    return TextFiles(backend, _vocabulary(path, backend), _special_tokens(special), template)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an empty one where there is no file.

    Raises:
        CheckpointError: the file is damaged or holds something else.
    """
    value = _decode(_read(path), path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as text ({error})") from error


def _decode(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); download it again") from error


def _converted(
    folder: Path, source: Path, **options: str
) -> tuple[str, dict[str, Any], str | None]:
    """``tokenizer.json``, special tokens and chat template, as transformers reads them."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **options)
        backend: str = tokenizer.backend_tokenizer.to_str()
    # Any of a dozen readers may be at work, and each fails in its own way.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{source}: no tokenizer can be read ({reason}); save one there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        ) from error
    return backend, dict(tokenizer.special_tokens_map), _default_template(tokenizer.chat_template)


def _vocabulary(path: Path, tokenizer: str) -> dict[str, int]:
    content = _decode(tokenizer, path)
    try:
        vocab = content["model"]["vocab"]
        # Unigram models list [token, score] pairs by id; all others map tokens to ids.
        pairs = (
            vocab.items() if isinstance(vocab, dict) else ((t[0], i) for i, t in enumerate(vocab))
        )
        ids = {str(token): int(index) for token, index in pairs}
        return ids | {
            item["content"]: int(item["id"]) for item in content.get("added_tokens") or ()
        }
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path}: not a tokenizers file; download it again") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``*_token`` entries as text; old files describe a token by an object."""
    found = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _chat_template(folder: Path, inline: object) -> str | None:
    """The template as a file, or as older checkpoints store it; the file wins."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read(path)
    return _default_template(
        inline or read_object(folder / "chat_template.json").get("chat_template")
    )


def _default_template(template: object) -> str | None:
    """One template, or the one named ``default`` of several (a dict, or a list in files)."""
    if isinstance(template, list):
        template = {item.get("name"): item.get("template") for item in template}
    if isinstance(template, Mapping):
        if "default" not in template:
            logger.warning("none of the chat templates %s is 'default'", ", ".join(template))
        template = template.get("default")
    return template if isinstance(template, str) else None
