"""Tensors and metadata of a GGUF file, de-quantised to fp32.

Read here rather than by ``AutoModelForCausalLM(gguf_file=…)``: that gives the same values (tested),
but drops biases, ``rope_freqs`` and head sizes it does not know in silence, and takes several times
as long. Every tensor is used or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pspec.errors import CheckpointError, ConfigError
from pspec.models.families import find_family, supported_families
from pspec.models.gguf_config import config_from_metadata, llama3_scaling
from pspec.models.weights import EMBEDDING, HEAD, row_blocks

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's module names to Hugging Face's."""

_ROPE_FREQS = "rope_freqs.weight"


class GgufSource:
    """A :class:`~pspec.models.weights.TensorSource` over one ``.gguf`` file.

    Raises:
        CheckpointError: the file is damaged or of an unsupported architecture, or ``gguf`` is
            not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _open(path)
        self._metadata = _metadata(reader)
        self.architecture = str(self._metadata.get("general.architecture"))
        _check_architecture(path, self.architecture)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._rope_freqs = tensors.pop(_ROPE_FREQS, None)
        self._tensors = {_foreign_name(name): tensor for name, tensor in tensors.items()}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by its Hugging Face name."""
        return {n: tuple(int(d) for d in t.shape[::-1]) for n, t in self._tensors.items()}

    def place(self, name: str) -> str:
        """The file."""
        return str(self.path)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor in fp32, as blocks of consecutive rows."""
        tensor = self._tensors[name]
        rows = (self._dequantise(tensor, *span) for span in row_blocks(self.shapes[name]))
        heads = self._interleaved_heads(name)
        if heads is None:
            return rows
        whole = torch.cat(list(rows))
        # llama.cpp puts the channels of a rotary pair side by side, here half a head apart.
        order = torch.arange(len(whole)).view(heads, -1, 2).transpose(1, 2).reshape(-1)
        return iter([whole[order]])

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads the rows of ``name`` hold, if their rotary pairs lie side by side."""
        if not find_family(self.architecture).GGUF_INTERLEAVED:
            return None
        heads: int = self._metadata[f"{self.architecture}.attention.head_count"]
        if ".q_proj." in name:
            return heads
        key = f"{self.architecture}.attention.head_count_kv"
        return int(self._metadata.get(key, heads)) if ".k_proj." in name else None

    def _dequantise(self, tensor: ReaderTensor, start: int, stop: int) -> Tensor:
        from gguf.quants import dequantize

        try:
            values = dequantize(tensor.data[start:stop], tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: {tensor.name} has type {tensor.tensor_type.name}, which cannot be "
                "de-quantised here; use another file of the model, such as Q4_K_M, Q8_0 or F16"
            ) from error
        return torch.from_numpy(values.astype("float32"))

    def token_id(self, kind: str) -> int | None:
        """Id of a special token such as ``bos`` or ``eot``, if the file names it."""
        value = self._metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return int(value) if value is not None else None

    def config(self) -> dict[str, Any]:
        """The same facts as a ``config.json``.

        Raises:
            ConfigError: metadata that is not understood.
            CheckpointError: ``rope_freqs`` that are not Llama 3's.
        """
        config = config_from_metadata(self.architecture, self._metadata)
        if self._rope_freqs is not None:
            factors = self._dequantise(self._rope_freqs, 0, len(self._rope_freqs.data))
            config["rope_scaling"] = llama3_scaling(factors, config.get("rope_theta"))
        names = self.shapes
        ends = (self.token_id("eos"), self.token_id("eot"))
        config |= {
            "vocab_size": names.get(EMBEDDING, (None,))[0],
            "attention_bias": any(name.endswith(".q_proj.bias") for name in names),
            "tie_word_embeddings": HEAD not in names,
            "bos_token_id": self.token_id("bos"),
            "eos_token_id": [token for token in ends if token is not None],
        }
        if any(name.endswith(".up_proj.bias") for name in names):
            config["mlp_bias"] = True
        return config


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            f"{path}: GGUF files need the gguf package; pip install 'pspec-toolkit[export]'"
        ) from error
    try:
        return GGUFReader(path)
    # The reader trusts the file: damage surfaces as whatever it trips over.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: not a whole GGUF file ({reason}); download it again"
        ) from error


def _check_architecture(path: Path, architecture: str) -> None:
    try:
        find_family(architecture)
    except ConfigError as error:
        names = ", ".join(supported_families())
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported; supported: {names}"
        ) from error


def _metadata(reader: GGUFReader) -> dict[str, Any]:
    """All fields but the arrays of the vocabulary, which the tokenizer reads for itself."""
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not (name.startswith("tokenizer.") and len(field.types) > 1)
    }


def _foreign_name(name: str) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; others unchanged."""
    module, _, kind = name.rpartition(".")
    if module == "output":
        return f"lm_head.{kind}"
    block, _, part = module.rpartition(".")
    if part not in NAMES:
        return name
    layer = f"{block.replace('blk', 'layers')}." if block else ""
    return f"model.{layer}{NAMES[part]}.{kind}"
