"""Make the peers' models from one GGUF file; run by the interpreter of the ``convert`` environment.

``hf GGUF OUT`` lets transformers dequantise the file into a Hugging Face folder of fp32 weights,
so that every 4-bit model starts from the same weights. ``ortgenai HF OUT OPTION...`` and
``openvino HF OUT OPTION...`` are the makers' own exporters over that folder.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


def folder_from_gguf(source: Path, output: Path) -> None:
    """The checkpoint and its tokenizer as transformers writes them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": source.parent,
        "gguf_file": source.name,
    }
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(**where).save_pretrained(output)


def ortgenai(source: Path, output: Path, options: list[str]) -> None:
    """Onnxruntime-genai's model builder, int4 for the CPU."""
    command = ["builder", "-i", str(source), "-o", str(output), "-p", "int4", "-e", "cpu"]
    command += ["-c", str(output.with_name("cache")), *options]
    sys.argv = command
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")


def openvino(source: Path, output: Path, options: list[str]) -> None:
    """optimum-intel's exporter: stateful IR, NNCF's weight compression, the tokenizer beside it."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(source), "--task", "text-generation-with-past", *options]
    subprocess.run([*command, str(output)], check=True)


def main() -> None:
    """Do what the arguments say."""
    kind, source, output, *options = sys.argv[1:]
    if kind == "hf":
        folder_from_gguf(Path(source), Path(output))
    elif kind == "ortgenai":
        ortgenai(Path(source), Path(output), options)
    elif kind == "openvino":
        openvino(Path(source), Path(output), options)
    else:
        sys.exit(f"convert.py: {kind} is not hf, ortgenai or openvino")


if __name__ == "__main__":
    main()
