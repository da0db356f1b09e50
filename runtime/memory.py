"""Does it fit? Memory is predicted before anything large is loaded."""

from __future__ import annotations

from pathlib import Path

from pspec.errors import EngineError

_MEMINFO = Path("/proc/meminfo")
_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def free_bytes() -> int | None:
    """Memory that can still be had: of the machine, or of the container; None where unknown."""
    found = [free for free in (_machine(), _container()) if free is not None]
    return min(found) if found else None


def check_memory(needed: int, what: str, hint: str) -> None:
    """Refuse what would not fit.

    Raises:
        EngineError: saying how much is needed, how much there is, and ``hint``.
    """
    free = free_bytes()
    if free is not None and needed > free:
        raise EngineError(
            f"{what} needs about {needed / 1e6:.0f} MB of memory, {free / 1e6:.0f} MB are free: "
            f"{hint}"
        )


def _machine() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _container() -> int | None:
    try:
        limit, used = (path.read_text(encoding="ascii").strip() for path in (_LIMIT, _USED))
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdigit() else None
