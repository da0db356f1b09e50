"""Install the peers and make their models, in a work folder: about 10 GB, of which 6 GB are torch.

Each peer gets an environment of its own with the releases of ``constraints/peers.txt``; one more,
``convert``, holds the exporters. What is there is kept, so an interrupted run can be repeated.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from catalogue import (
    CONSTRAINTS,
    CONVERSIONS,
    CONVERTERS,
    GGUF,
    HERE,
    PEERS,
    Peer,
    npm_packages,
    python_of,
)

from pspec.cli_run import run
from pspec.errors import ConfigError
from pspec.models.smollm2 import fetch_smollm2


def call(command: Sequence[str]) -> None:
    """Run a step.

    Raises:
        ConfigError: it failed; its own words are above.
    """
    print("+", " ".join(Path(part).name if "/" in part else part for part in command), flush=True)
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"{Path(command[0]).name} failed, see above: {error}") from error


def environment(folder: Path, packages: Sequence[str]) -> None:
    """A virtual environment with ``packages``."""
    python = python_of(folder)
    if not python.exists():
        call([sys.executable, "-m", "venv", str(folder)])
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    call([*install, "-c", str(CONSTRAINTS), *packages])


def install_peer(peer: Peer, work: Path) -> None:
    """What runs a peer; no install script of a package is run."""
    folder = work / peer.folder
    if peer.packages:
        environment(folder, peer.packages)
        return
    if shutil.which("npm") is None:
        raise ConfigError(f"{peer.name} needs npm: install Node.js 20 or newer, or leave it out")
    folder.mkdir(exist_ok=True)
    command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--omit=optional"]
    call([*command, "--no-audit", "--no-fund", "--save-exact", *npm_packages()])


def make_model(kind: str, source: Path, output: Path, python: Path, options: list[str]) -> None:
    """Convert into a folder that appears only once it is whole."""
    if output.exists():
        return
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    script = str(HERE / "convert.py")
    call([str(python), script, kind, str(source), str(partial), *options])
    partial.replace(output)


def make_models(work: Path, models: set[str]) -> None:
    """The models of the chosen peers."""
    gguf = work / GGUF
    gguf.parent.mkdir(exist_ok=True)
    if not gguf.exists():
        shutil.copyfile(fetch_smollm2(), gguf)
    if all((work / model).exists() for model in models):
        return
    environment(work / "convert", CONVERTERS)
    python, folder = python_of(work / "convert"), work / "models" / "hf"
    make_model("hf", gguf, folder, python, [])
    for model, options in CONVERSIONS.items():
        if model in models:
            make_model(Path(model).name, folder, work / model, python, options)


@click.command(help=__doc__)
@click.option(
    "--work", type=click.Path(path_type=Path), default=Path("bench-peers"), show_default=True
)
@click.option(
    "--peer",
    "names",
    multiple=True,
    type=click.Choice(list(PEERS)),
    default=tuple(PEERS),
    show_default=True,
    help="Repeatable.",
)
def main(work: Path, names: tuple[str, ...]) -> None:
    """Install and convert; see the module."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    chosen = [PEERS[name] for name in names]
    make_models(work, {peer.model for peer in chosen})
    for peer in chosen:
        install_peer(peer, work)
        print(f"{peer.name}: ready", flush=True)


if __name__ == "__main__":
    run(main, "install.py")
