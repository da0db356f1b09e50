"""From torch modules to a bundle of static ONNX graphs."""
