"""How a command ends: well, or with one line that says why not."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import click

from pspec.errors import PspecError


def run(command: Callable[..., Any], name: str) -> None:
    """Run a command: bad input is one line and status 2, never a traceback."""
    try:
        with _one_line():
            command.main(prog_name=name, standalone_mode=False)  # type: ignore[attr-defined]
    except (PspecError, click.ClickException) as error:
        _refuse(error.format_message() if isinstance(error, click.ClickException) else str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        _drop_output()
        _refuse(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _refuse(text: str) -> None:
    click.echo("error: " + " ".join(text.split()), err=True)
    sys.exit(2)


def _drop_output() -> None:
    """Send what standard output still holds nowhere, or Python would complain of it at exit."""
    with contextlib.suppress(OSError, ValueError):  # one that is no file has nothing to complain of
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stdout.fileno())
        finally:
            os.close(nowhere)


@contextlib.contextmanager
def export_imports() -> Iterator[None]:
    """Turn a missing export dependency into one line.

    Raises:
        PspecError: with the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "pspec").partition(".")[0]
        if package == "pspec":
            raise
        raise PspecError(
            f"{package} is not installed: pip install 'pspec-toolkit[export,cpu]'"
        ) from error


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Keep standard error for our own last word.

    Third parties are silenced. Our own warnings wait until the command has gone well: an error
    stands alone.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # else Python prints what nobody handles
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    held = logging.handlers.MemoryHandler(1 << 16, logging.CRITICAL, shown, flushOnClose=False)
    logger = logging.getLogger("pspec")
    logger.addHandler(held)
    try:
        yield
        held.flush()
    finally:
        logger.removeHandler(held)
