"""The peers: how each is installed, started, and what it loads."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from pspec.errors import ConfigError
from pspec.models.smollm2 import FILE

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE.parents[1] / "constraints" / "peers.txt"
NODE_LLAMA_CPP = "3.21.1"


@dataclass(frozen=True)
class Peer:
    """Something to measure.

    Attributes:
        name: what reports call it.
        script: its runner.
        folder: its environment within the work folder; empty for this interpreter.
        model: path of what it loads, within the work folder where it is relative.
        weights: its 4-bit weights in words.
        packages: what pip installs into the environment; none where npm does.
    """

    name: str
    script: str
    folder: str
    model: str
    weights: str
    packages: tuple[str, ...] = ()

    def command(self, work: Path) -> list[str]:
        """How to start its runner."""
        script = str(HERE / self.script)
        if self.script.endswith(".mjs"):
            return ["node", script, str(work / self.folder)]
        return [str(python_of(work / self.folder)) if self.folder else sys.executable, script]

    def installed(self, work: Path) -> bool:
        """Whether the model and what runs it are there."""
        runs = "node_modules/node-llama-cpp" if self.script.endswith(".mjs") else "bin/python"
        return (work / self.model).exists() and (work / self.folder / runs).exists()


GGUF = f"models/{FILE}"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "llama.cpp",
            "llamanode_runner.mjs",
            "llamanode",
            GGUF,
            "Q4_1, blocks of 32, head Q8_0; node-llama-cpp's kernels for this CPU",
        ),
        Peer(
            "llama.cpp AVX2",
            "llamacpp_runner.py",
            "llamacpp",
            GGUF,
            "the same file; xllamacpp's wheel knows no AVX-512",
            ("xllamacpp",),
        ),
        Peer(
            "ORT GenAI",
            "ortgenai_runner.py",
            "ortgenai",
            "models/ortgenai",
            "int4, blocks of 32, accuracy level 4, head int4",
            ("onnxruntime-genai",),
        ),
        Peer(
            "OpenVINO GenAI",
            "openvino_runner.py",
            "openvino",
            "models/openvino",
            "int4 symmetric, groups of 64, head int8",
            ("openvino-genai",),
        ),
    )
}
CONVERTERS = ("optimum-intel[openvino]", "gguf", "accelerate", "onnxruntime-genai", "onnx-ir")
CONVERSIONS = {
    "models/ortgenai": ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"],
    "models/openvino": ["--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0"],
}


def python_of(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / "bin" / "python"


def npm_packages() -> list[str]:
    """The binding, and the one set of binaries that fits: its optional ones are 700 MB.

    Raises:
        ConfigError: no binaries for this machine.
    """
    kinds = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}
    kind = kinds.get(platform.machine()) if sys.platform == "linux" else None
    if kind is None:
        raise ConfigError("these benchmarks know Linux on x86-64 and ARM64 only")
    names = ("node-llama-cpp", f"@node-llama-cpp/{kind}")
    return [f"{name}@{NODE_LLAMA_CPP}" for name in names]


def pspec_peers(bundles: tuple[Path, ...]) -> list[Peer]:
    """A peer for each bundle, named after its folder where there are several."""
    return [
        Peer(
            "pspec" if len(bundles) == 1 else f"pspec {bundle.name}",
            "pspec_runner.py",
            "",
            str(bundle.resolve()),
            "the bundle's",
        )
        for bundle in bundles
    ]
