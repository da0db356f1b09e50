"""Speculative decoding with parallel drafters: PyTorch to static ONNX graphs to engines."""

__version__ = "0.1.0"
