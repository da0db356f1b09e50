"""The families of targets, found by their files: to add one, add a module with a ``resolve``.

A family's module lies in this package, is named after its ``model_type`` and defines what
:class:`Family` lists. Nothing else has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, Protocol, cast

import pspec.models
from pspec.errors import ConfigError
from pspec.models.config import TargetConfig
from pspec.models.hf_config import HARMLESS, NEUTRAL

_QUANTISED = ("quantization_config", "quantization", "compression_config")


class Family(Protocol):
    """What the module of a family defines."""

    MODEL_TYPE: str
    """``model_type`` of its configs, and the module's own name."""
    GGUF_INTERLEAVED: bool
    """Whether llama.cpp stores the rows of q and k with rotary pairs side by side."""

    def resolve(self, config: Mapping[str, Any]) -> TargetConfig: ...


def resolve_target(config: Mapping[str, Any]) -> TargetConfig:
    """Resolve a Hugging Face ``config.json`` to the numbers its graph needs.

    Raises:
        ConfigError: an unknown ``model_type``, a multimodal wrapper, a quantised checkpoint, or
            any field that is missing, inconsistent, unknown or unsupported.
    """
    for key in _QUANTISED:
        if config.get(key) is not None:
            raise ConfigError(f"{key}: quantised checkpoints are not supported; use the original")
    nested = [k for k, v in config.items() if _is_wrapped(k, v)]
    if nested:
        raise ConfigError(
            f"{', '.join(nested)}: wrappers of several models are not supported; use a text-only "
            "checkpoint"
        )
    values = {key: value for key, value in config.items() if key not in _QUANTISED}
    return find_family(config.get("model_type")).resolve(values)


def _is_wrapped(key: str, value: object) -> bool:
    known = key in HARMLESS or key in NEUTRAL
    return key.endswith("_config") and isinstance(value, Mapping) and not known


def find_family(model_type: object) -> Family:
    """The module of a ``model_type``, imported on demand.

    Raises:
        ConfigError: with the types that are supported.
    """
    found = _family_of(model_type) if isinstance(model_type, str) else None
    if found is None:
        names = ", ".join(supported_families())
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {names}")
    return found


def supported_families() -> list[str]:
    """Every ``model_type`` that has a module, sorted. Imports the modules of this package."""
    names = sorted(info.name for info in iter_modules(pspec.models.__path__))
    return [name for name in names if _family_of(name) is not None]


def _family_of(name: str) -> Family | None:
    path = f"pspec.models.{name}"
    if not name.isidentifier() or find_spec(path) is None:
        return None
    module = import_module(path)
    is_family = getattr(module, "MODEL_TYPE", None) == name
    return cast(Family, module) if is_family else None
