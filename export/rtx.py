"""TensorRT-RTX ahead of time: NVIDIA's own parser and compiler, which need no GPU.

The precision is the graph's (strongly typed). An engine that was built here runs on RTX GPUs only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pspec.errors import EngineError


def parse_graph(path: Path) -> list[str]:
    """What the parser has against a graph, a line each that names the node; empty if it takes it.

    Raises:
        EngineError: when TensorRT-RTX is not installed.
    """
    trt = _library()
    logger = _logger(trt, [])
    return _parse(trt, logger, _network(trt, trt.Builder(logger)), path)[1]


def build_engine_bytes(path: Path) -> bytes:
    """Compile a graph for every RTX GPU from compute capability 8.0 on.

    Raises:
        EngineError: when TensorRT-RTX is not installed or refuses the graph.
    """
    trt = _library()
    complaints: list[str] = []
    logger = _logger(trt, complaints)
    builder = trt.Builder(logger)
    network = _network(trt, builder)
    # The network points into the parser's weights, so the parser lives until the build is done.
    _parser, errors = _parse(trt, logger, network, path)
    if errors:
        raise EngineError(f"tensorrt-rtx cannot parse {path.name}: {errors[0]}")
    engine = builder.build_serialized_network(network, builder.create_builder_config())
    if engine is None:
        reason = complaints[0] if complaints else "it gave no reason"
        raise EngineError(f"tensorrt-rtx cannot build {path.name}: {reason}")
    return bytes(engine)


def _library() -> Any:
    try:
        import tensorrt_rtx
    except ImportError as error:
        raise EngineError(
            "tensorrt-rtx is not installed here: pip install 'pspec-toolkit[rtx]' (x86-64 only)"
        ) from error
    return tensorrt_rtx


def _network(trt: Any, builder: Any) -> Any:
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def _parse(trt: Any, logger: Any, network: Any, path: Path) -> tuple[Any, list[str]]:
    parser = trt.OnnxParser(network, logger)
    taken = path.is_file() and parser.parse_from_file(str(path))
    if taken and network.num_outputs:  # an empty file parses
        return parser, []
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return parser, [_one_line(error) for error in errors] or [f"{path} is no ONNX graph"]


def _one_line(error: Any) -> str:
    where = " ".join(part for part in (error.node_name(), error.node_operator()) if part)
    text = " ".join(error.desc().split())
    return f"{where}: {text}" if where else text


def _logger(trt: Any, complaints: list[str]) -> Any:
    """A logger that keeps errors and says nothing."""

    class Quiet(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                complaints.append(" ".join(text.split()))

    return Quiet()
