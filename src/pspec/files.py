"""Writing so that nothing is ever half there: beside the place, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pspec.errors import PspecError


def expand_user(path: str | Path) -> Path:
    """A path whose leading ``~`` or ``~name`` is the home of a user.

    Raises:
        PspecError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise PspecError(f"{path}: there is no such user or no home folder") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file, or leave what was there."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, put in the place of ``folder`` when the block ends without an error."""
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        publish_folder(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def publish_folder(fresh: Path, folder: Path) -> None:
    """Rename ``fresh`` to ``folder``; what stood there goes away only once the new one is in."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    replaces = os.path.lexists(folder)
    if replaces:
        folder.rename(old)
    try:
        fresh.rename(folder)
    except BaseException:
        if replaces:
            old.rename(folder)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    elif replaces:  # a file, or a link, whose target is left alone
        old.unlink()


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold ``folder`` (made if needed) for this process alone.

    Raises:
        PspecError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PspecError(
                f"{folder} is being written by another process: wait for it"
            ) from error
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(place: Path, work: Path | None = None) -> Iterator[None]:
    """Turn what a disk can do to us into one line.

    Args:
        place: what was to be written.
        work: folder that the block removes when it fails; the line says whether it is gone.

    Raises:
        PspecError: for a full disk, a missing permission or another refusal of the file system.
    """
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "a file grew past the size limit",
            errno.EACCES: "permission denied",
            errno.EROFS: "the file system is read-only",
        }
        reason = reasons.get(error.errno or 0) or error.strerror
        if reason is None:
            raise
        left = ""
        if work is not None:
            left = f"; {work if os.path.lexists(work) else 'nothing'} was left behind"
        raise PspecError(f"cannot write to {place}: {reason}{left}") from error


def sha256_file(path: Path) -> str:
    """Hash of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
