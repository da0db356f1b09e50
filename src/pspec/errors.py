"""The errors a user can cause, each one line: what was wrong, and what would be right."""

from __future__ import annotations


class PspecError(Exception):
    """Bad input or a refused request: the command line prints it and exits with status 2."""


class ConfigError(PspecError):
    """A model, drafter or setting that this version cannot express."""


class CheckpointError(PspecError):
    """Weights that are missing, damaged, left over or of another shape."""


class BundleError(PspecError):
    """A bundle on disk that is damaged, incomplete, or of another version."""


class RequestError(PspecError, ValueError):
    """A generation request that cannot be met."""


class EngineError(PspecError):
    """An engine that cannot be built, loaded or run here."""
