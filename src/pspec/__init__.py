"""Parallel-drafter speculative decoding: PyTorch to static ONNX graphs to engine files, run from Python."""

__version__ = "0.1.0"
