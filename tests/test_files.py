"""Writing that is never half there, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pspec.errors import PspecError
from pspec.files import disk_errors, only_writer, replaced_folder, write_file

HOLDER = """
import sys
from pathlib import Path
from pspec.files import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    source = Path(__file__).parent.parent / "src"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(PspecError, match="being written by another process"),
            only_writer(folder),
        ):
            pass
        holder.kill()
    with only_writer(folder):  # a killed process holds nothing
        assert folder.is_dir()


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PspecError, match="the disk is full"), disk_errors(path):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_nothing_left_behind_is_only_said_where_it_is_true(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "no space")
    gone = tmp_path / "gone"
    ends = {None: "", gone: "; nothing was left behind", tmp_path: f"; {tmp_path} was left behind"}
    for work, end in ends.items():
        with pytest.raises(PspecError, match=f"the disk is full{end}$"), disk_errors(gone, work):
            raise full


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with replaced_folder(folder) as fresh:
        (fresh / "a").write_bytes(b"1")
    with contextlib.suppress(RuntimeError), replaced_folder(folder) as fresh:
        (fresh / "b").write_bytes(b"2")
        raise RuntimeError
    assert [entry.name for entry in folder.iterdir()] == ["a"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]
