"""Memory is predicted, and what does not fit is refused before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from bundles import TinyBundle
from pspec.errors import EngineError
from pspec.runtime import memory
from pspec.runtime.bundle import open_bundle
from pspec.runtime.engines import open_engine
from pspec.runtime.fused import cache_bytes, make_cache


def test_the_smaller_of_machine_and_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path, text in (
        ("_MEMINFO", tmp_path / "meminfo", "MemTotal: 9 kB\nMemAvailable:    3000 kB\n"),
        ("_LIMIT", tmp_path / "limit", "5000\n"),
        ("_USED", tmp_path / "used", "1000\n"),
    ):
        path.write_text(text, encoding="ascii")
        monkeypatch.setattr(memory, name, path)
    assert memory.free_bytes() == 4000

    (tmp_path / "limit").write_text("max\n", encoding="ascii")
    assert memory.free_bytes() == 3000 * 1024


def test_nothing_is_refused_where_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MEMINFO", "_LIMIT", "_USED"):
        monkeypatch.setattr(memory, name, tmp_path / "none")
    assert memory.free_bytes() is None
    memory.check_memory(1 << 60, "it", "more")


def test_an_engine_that_does_not_fit_is_refused(
    llama_bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(llama_bundle.folder)
    open_engine(bundle, "target", "onnxruntime", None)
    monkeypatch.setattr(memory, "free_bytes", lambda: 10_000_000)
    with pytest.raises(EngineError, match=r"needs about .* MB of memory, 10 MB are free"):
        open_engine(bundle, "target", "onnxruntime", None)


def test_the_cache_is_as_large_as_predicted(llama_bundle: TinyBundle) -> None:
    manifest = open_bundle(llama_bundle.folder).manifest
    for role in manifest.roles:
        assert make_cache(manifest, role, 3).nbytes == cache_bytes(manifest, role, 3)
