"""What answers are compared with: transformers, or plain decoding on the engine itself."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache

from pspec.errors import ConfigError
from pspec.models.checkpoint import load_target
from pspec.models.smollm2 import fetch_smollm2
from pspec.runtime.bundle import Bundle
from pspec.runtime.decode import Decoding, TreeSettings
from pspec.runtime.engines import open_engine
from pspec.runtime.manifest import Manifest
from pspec.runtime.target import Target
from pspec.runtime.tree import root_only


def target_path(name: str) -> str:
    """A target as ``pspec-export`` takes it, its alias resolved."""
    return str(fetch_smollm2()) if name == "smollm2" else name


def check_same_weights(target: str, manifest: Manifest) -> None:
    """See that a bundle was exported from the weights it is to be compared with.

    Raises:
        ConfigError: another checkpoint.
    """
    if load_target(target).fingerprint != manifest.provenance["target_fingerprint"]:
        raise ConfigError(
            f"--target {Path(target).name} is not what the bundle was exported from "
            f"({manifest.name}): name that checkpoint, or export again"
        )


def load_model(target: str, threads: int | None) -> Any:
    """The checkpoint in fp32."""
    if threads:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    path = Path(target)
    if path.suffix == ".gguf":
        where: dict[str, Any] = {
            "pretrained_model_name_or_path": path.parent,
            "gguf_file": path.name,
        }
    else:
        where = {"pretrained_model_name_or_path": target}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval()


class Reference:
    """Greedy decoding in transformers."""

    def __init__(self, target: str, threads: int | None = None) -> None:
        self._model = load_model(target, threads)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int]) -> list[int]:
        """Ids after the prompt, with the end-of-sequence token if it ended by one."""
        # Settings of the checkpoint must not mix in.
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(eos) or None,
            pad_token_id=eos[0] if eos else 0,
        )
        ids = torch.tensor([list(prompt)])
        output = self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
        answer: list[int] = output[0, len(prompt) :].tolist()
        return answer

    @torch.inference_mode()
    def gap(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        """How far the least of ``tokens`` lies below the best logit after ``context``.

        For the two best tokens that is the top-2 gap; for any other it is more.
        """
        logits = self._model(input_ids=torch.tensor([list(context)]), logits_to_keep=1).logits
        row = logits[0, -1].double()
        return float(row.max() - row[list(tokens)].min())


class EngineReference:
    """The engine's own plain decoding, where its weights or its rounding are not transformers'."""

    def __init__(self, bundle: Bundle, engine: str, threads: int | None) -> None:
        opened = open_engine(bundle, "target", engine, threads)
        self._target = Target(opened, bundle.manifest.plan)
        self._vocab = bundle.manifest.target.vocab_size

    def generate(self, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int]) -> list[int]:
        """Ids after the prompt, with the end-of-sequence token if it ended by one."""
        plain = TreeSettings(1)
        decoding = Decoding(self._target, None, plain, frozenset(eos), self._vocab)
        return [token for block in decoding.run(prompt, max_new_tokens) for token in block.tokens]

    def gap(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        """How far the least of ``tokens`` lies below the best logit after ``context``."""
        self._target.start()
        for _ in self._target.prefill(context[:-1]):
            pass
        self._target.verify(root_only(context[-1]))
        row = self._target.engine.bind(1, 1).outputs["logits"][0, 0].astype(np.float64)
        return float(row.max() - row[list(tokens)].min())


class StaticSteps:
    """Calls of some new tokens over a static cache that stays filled to one length."""

    def __init__(self, model: Any, prompt: Sequence[int], slots: int) -> None:
        self._model = model
        self._length = len(prompt)
        # transformers renamed the argument during 5.x.
        named = inspect.signature(model.forward).parameters
        self._name = "cache" if "cache" in named else "past_key_values"
        self._cache: Any = StaticCache(config=model.config, max_cache_len=slots)
        self._forward(torch.tensor([list(prompt)]), 0, logits_to_keep=1)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of every one of ``ids[1, n]``, which :meth:`rewind` takes back."""
        return self._forward(ids, self._length)

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        for layer in self._cache.layers:
            layer.crop(-count)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, start: int, **options: Any) -> torch.Tensor:
        positions = torch.arange(start, start + ids.shape[1])[None]
        options[self._name] = self._cache
        output = self._model(input_ids=ids, position_ids=positions, use_cache=True, **options)
        logits: torch.Tensor = output.logits
        return logits
