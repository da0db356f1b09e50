"""The commands. Each imports what it needs when it runs, so that every ``--help`` works at once."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import pspec
from pspec.errors import PspecError

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
ENGINE = click.option("--engine", default="auto", show_default=True, help="Engine to run on.")
THREADS = click.option(
    "--threads", type=click.IntRange(1), help="CPU threads; one a core if unset."
)
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(pspec.__version__, prog_name="pspec")
@click.pass_context
def app(context: click.Context) -> None:
    """Speculative decoding with parallel drafters: export, verify, generate."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command(context_settings=SETTINGS)
@click.argument("target")
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), help="Bundle folder to make."
)
@click.option("--drafter", type=click.Path(path_type=Path), help="Drafter directory.")
@click.option("--precision", default="fp32", show_default=True, help="fp32, the only one so far.")
@click.option("--platform", default="generic", show_default=True, help="generic, likewise.")
@click.option("--engine", default="auto", show_default=True, help="Engine file to build, or none.")
@click.option(
    "--max-context", default=1024, show_default=True, help="Longest prompt and answer, in tokens."
)
@click.option("--nodes", default=8, show_default=True, help="Tree nodes of a verify call.")
@click.option("--batch", default=1, show_default=True, help="Rows of every graph.")
@click.option("--force", is_flag=True, help="Replace an existing output folder.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, write nothing.")
def export(engine: str, dry_run: bool, **options: Any) -> None:
    """Export TARGET (a Hugging Face folder, .gguf file, hub id, or `smollm2`) to a bundle.

    Example: pspec-export smollm2 --output smollm2-bundle
    """
    from pspec.runtime.engines import choose_engine

    if engine != "none":
        choose_engine(engine)
    with _export_imports():
        from pspec.export.pipeline import export_bundle
        from pspec.export.request import ExportRequest, plan_export
        from pspec.show import Progress, show_parity, show_plan
    request = ExportRequest(**options | {"target": _target(options["target"])})
    if dry_run:
        target, drafter, plan = plan_export(request)
        show_plan(request, target, drafter, plan)
        return
    with Progress() as progress:
        folder = export_bundle(request, progress)
    show_parity(folder)
    click.echo(f"bundle: {folder}")


@app.command()
@BUNDLE
@click.option("--engine", default=None, help="Also run the graphs on this engine: parity.")
def verify(bundle: Path, engine: str | None) -> None:
    """Check every hash and shape of BUNDLE, and with --engine that its graphs compute the same."""
    from pspec.runtime.check import check_bundle

    for line in check_bundle(bundle, engine):
        click.echo(line)
    click.echo(f"{bundle}: ok")


@app.command()
@BUNDLE
@click.option("--prompt", help="Text to answer.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the text.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@click.option("--max-new-tokens", default=256, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--stop", "stops", multiple=True, help="Text that ends the answer; repeatable.")
@ENGINE
@THREADS
@click.option(
    "--draft",
    type=click.Choice(["auto", "bundle", "lookup", "off"]),
    default="auto",
    show_default=True,
    help="Where drafted tokens come from.",
)
@click.option("--nodes", type=int, help="Tree nodes a round; the bundle's number if unset.")
@AS_JSON
def generate(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    raw: bool,
    engine: str,
    threads: int | None,
    as_json: bool,
    stops: tuple[str, ...],
    **settings: Any,
) -> None:
    """Answer one prompt, streaming.

    Example: pspec generate smollm2-bundle --prompt "What is a token tree?"
    """
    from pspec.runtime.generate import GenerationConfig, Generator

    text = _prompt_text(prompt, prompt_file)
    if settings["nodes"] is not None and settings["nodes"] < 1:
        raise click.UsageError(f"--nodes {settings['nodes']}: expected 1 or more")
    config = GenerationConfig(stop_strings=stops, **settings)
    generator = Generator.open(bundle, engine=engine, threads=threads)
    request = text if raw else [{"role": "user", "content": text}]
    if as_json:
        click.echo(json.dumps(generator.generate(request, config).to_json(), ensure_ascii=False))
        return
    for chunk in generator.stream_generate(request, config):
        click.echo(chunk.text, nl=False)
    click.echo()


@app.command()
@BUNDLE
@click.option("--system", help="System message.")
@click.option("--max-new-tokens", default=512, show_default=True)
@ENGINE
@THREADS
def chat(
    bundle: Path, system: str | None, max_new_tokens: int, engine: str, threads: int | None
) -> None:
    """Talk to BUNDLE; an empty line or Ctrl-D ends, /reset starts over."""
    from pspec.runtime.generate import GenerationConfig, Generator

    generator = Generator.open(bundle, engine=engine, threads=threads)
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while line := _read_line():
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        for chunk in generator.stream_generate(messages, config):
            click.echo(chunk.text, nl=False)
            answer += chunk.text
        click.echo()
        messages.append({"role": "assistant", "content": answer})


@app.command()
@click.argument("path", type=click.Path(path_type=Path))
@AS_JSON
def inspect(path: Path, as_json: bool) -> None:
    """Show what a bundle or a drafter directory holds."""
    from pspec.runtime.manifest import MANIFEST_FILE
    from pspec.show import show_bundle, show_drafter

    if (path / MANIFEST_FILE).exists():
        show_bundle(path, as_json)
        return
    if not (path / "config.json").exists():
        raise PspecError(f"{path} is neither a bundle nor a drafter directory")
    with _export_imports():
        show_drafter(path, as_json)


@app.command()
@AS_JSON
def doctor(as_json: bool) -> None:
    """Say what this machine can export, build and run, and what to install for the rest."""
    import msgspec

    from pspec.doctor import examine
    from pspec.show import show_report

    report = examine()
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        show_report(report)
    if report.failed:
        sys.exit(1)


@app.command()
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("smollm2-bundle"),
    show_default=True,
    help="Bundle folder; one that is there already is used.",
)
@click.option("--prompt", help="Question to answer instead of the demo's own.")
@click.option("--max-new-tokens", default=96, show_default=True)
def demo(output: Path, prompt: str | None, max_new_tokens: int) -> None:
    """Fetch SmolLM2-135M, export it with a drafter, and answer with and without speculation."""
    with _export_imports():
        from pspec.demo import run_demo

        run_demo(output, prompt, max_new_tokens)


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError("give one of --prompt and --prompt-file")
    if file is None:
        assert prompt is not None
        text = prompt
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PspecError(f"--prompt-file {file} cannot be read as UTF-8 text") from error
    if not text:
        raise PspecError("the prompt is empty: give it some text")
    return text


def _read_line() -> str:
    """A line of the user's; empty at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        click.echo()
        return ""
    except UnicodeDecodeError as error:
        raise PspecError("the input is not UTF-8 text") from error


def _target(name: str) -> str:
    """Resolve the alias of the demo model."""
    if name != "smollm2":
        return name
    from pspec.models.smollm2 import fetch_smollm2

    return str(fetch_smollm2())


class _export_imports:  # noqa: N801 - a context manager that reads as a verb
    """Turns a missing export dependency into one line."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            if package != "pspec":
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


def run(command: Callable[..., Any], name: str) -> None:
    """Run a command: bad input is one line and status 2, never a traceback."""
    try:
        with _one_line():
            command.main(prog_name=name, standalone_mode=False)  # type: ignore[attr-defined]
    except (PspecError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo("error: " + " ".join(text.split()), err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def main() -> None:
    """Entry point of ``pspec``."""
    run(app, "pspec")


def export_main() -> None:
    """Entry point of ``pspec-export``."""
    run(export, "pspec-export")
