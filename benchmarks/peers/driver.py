"""Runner processes: started once, stopped between their jobs, so that only one ever computes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from protocol import Answer, Start

from pspec.errors import PspecError

_WARM_UP = ([1, 2, 3, 4, 5, 6, 7, 8], 2)
"""An untimed job before each timed one: threads and caches of a stopped process are cold."""


class Runner:
    """One peer in one mode.

    Between jobs the process is stopped with SIGSTOP: some thread pools spin for a while after
    their work, and whoever is measured next must not pay for it.
    """

    def __init__(
        self, name: str, command: Sequence[str], start: Start, log: Path, timeout: float
    ) -> None:
        self.name = name
        self.mode = start.mode
        self._timeout = timeout
        self._log: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            self.about = self._ask(asdict(start))
        except BaseException:
            self.close()
            raise
        self._pause()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        """Wake up, warm up, do one job, stop.

        Raises:
            PspecError: the peer failed, died, or took too long.
        """
        self._process.send_signal(signal.SIGCONT)
        self._job(*_WARM_UP)
        answer = self._job(ids, max_new_tokens)
        self._pause()
        return answer

    def close(self) -> None:
        """End the process, whatever state it is in."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        # The signal takes effect later; an exit is left for Popen to see.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _job(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        job = {"ids": list(ids), "max_new_tokens": max_new_tokens, "mode": self.mode}
        return Answer(**self._ask(job))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        end = time.monotonic() + self._timeout
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        ready, _, _ = select.select([self._process.stdout], [], [], end - time.monotonic())
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise self._failure("ended" if ready else f"said nothing for {self._timeout:.0f} s")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._failure(f"failed: {reply['error']}")
        return reply

    def _failure(self, what: str) -> PspecError:
        return PspecError(
            f"the runner of {self.name}, {self.mode}, {what}; its own words are in "
            f"{Path(self._log.name).name} of the work folder's logs"
        )
