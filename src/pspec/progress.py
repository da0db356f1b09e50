"""How long work tells how it goes."""

from __future__ import annotations


class Watcher:
    """Hears of stages; this one keeps silent."""

    def stage(self, name: str, detail: str) -> None:
        """A stage begins."""

    def advance(self, done: int, total: int) -> None:
        """Work inside the stage went on."""

    def note(self, text: str) -> None:
        """Something worth a line."""
