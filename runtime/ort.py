"""ONNX Runtime's CPU sessions and the buffers that are bound to them, by address, once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from pspec.errors import EngineError
from pspec.runtime.engine import Array
from pspec.runtime.manifest import TensorSpec

_TYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "int32": np.int32,
    "bool": np.bool_,
}


def open_session(
    path: Path,
    threads: int | None,
    *,
    prepack: bool = True,
    weights: Path | None = None,
    profile: Path | None = None,
) -> Any:
    """Load a graph on the CPU.

    Args:
        path: the ONNX file.
        threads: intra-op threads; None lets ONNX Runtime take one a core.
        prepack: re-lay weights for speed; without it they stay mapped from the file.
        weights: folder that the places of weights are relative to; by default the graph's own.
        profile: where a file with the time of every operator begins its name.

    Raises:
        EngineError: when ONNX Runtime cannot load the graph.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Target and drafter take turns on the same cores: a pool that goes on spinning after its run
    # slows the other one's down.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Weight-only means weights only: by default a standard graph's quantised product quantises its
    # inputs as well.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if threads:
        options.intra_op_num_threads = threads
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if weights is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(weights.absolute()))
    with ort_errors(f"onnxruntime cannot load {path.name}"):
        source = path if weights is None else path.read_bytes()
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def ort_errors(what: str) -> Iterator[None]:
    """Turn whatever ONNX Runtime raises into an ``EngineError`` of one line."""
    try:
        yield
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise EngineError(f"{what}: {reason}") from error


def strange_name(session: Any, inputs: Collection[str], outputs: Collection[str]) -> str | None:
    """What is wrong with the names of a session's inputs and outputs, or None.

    An input that the frozen graph has no use for may be missing from the session.
    """
    takes = {value.name for value in session.get_inputs()}
    gives = {value.name for value in session.get_outputs()}
    if takes - set(inputs):
        return f"its input {min(takes - set(inputs))} is not in the manifest"
    if gives - set(outputs):
        return f"its output {min(gives - set(outputs))} is not in the manifest"
    if set(outputs) - gives:
        return f"it has no output {min(set(outputs) - gives)}"
    return None


def check_names(session: Any, file: str, inputs: Collection[str], outputs: Collection[str]) -> None:
    """See that what will be bound is what the graph has.

    Raises:
        EngineError: naming the odd one.
    """
    if strange := strange_name(session, inputs, outputs):
        raise EngineError(f"{file} does not fit the manifest: {strange}")


def run_bound(session: Any, io: Any, file: str) -> float:
    """Run on bound buffers; returns the seconds it took.

    Raises:
        EngineError: with ONNX Runtime's reason.
    """
    start = time.perf_counter()
    with ort_errors(f"onnxruntime cannot run {file}"):
        session.run_with_iobinding(io)
    return time.perf_counter() - start


def bind(session: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Any:
    """An I/O binding over arrays, which must outlive it.

    An input that a graph has no use for may be missing from the session.
    """
    io, known = session.io_binding(), {value.name for value in session.get_inputs()}
    for name, array in inputs.items():
        if name in known:
            io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    return io


def allocate(specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Zeroed arrays for the tensors that are not of a cache, by name."""
    found = {}
    for spec in without_cache(specs):
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
        found[spec.name] = np.zeros(shape, _TYPES[spec.dtype])
    return found


def without_cache(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Inputs or outputs that are not cache tensors."""
    return [spec for spec in specs if not spec.name.startswith(("past_", "new_", "present_"))]


def per_layer(kind: str, rows: Array) -> dict[str, Array]:
    """Key and value tensors of each layer as views of ``[layers, 2, ...]``, by graph name."""
    parts = enumerate(("key", "value"))
    return {
        f"{kind}_{part}.{layer}": rows[layer, index]
        for index, part in parts
        for layer in range(rows.shape[0])
    }
