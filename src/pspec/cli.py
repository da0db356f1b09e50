"""The commands. Each imports what it needs when it runs, so that every ``--help`` works at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import pspec
from pspec.cli_run import export_imports, run
from pspec.errors import PspecError

if TYPE_CHECKING:
    from pspec.runtime.calibration import Curve
    from pspec.runtime.generate import Chunk, Generation

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
ENGINE = click.option("--engine", default="auto", show_default=True, help="Engine to run on.")
THREADS = click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads; one a core if unset."
)


def _nodes(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    """A number of tree nodes, ``auto``, or what is the default."""
    if value is None or value == "auto":
        return value
    if not value.isdecimal() or int(value) < 1:
        raise click.UsageError(f"--nodes {value}: expected a number of 1 or more, or auto")
    return int(value)


NODES = click.option(
    "--nodes",
    metavar="N|auto",
    callback=_nodes,
    help="Tree nodes a round; auto: what pays on this device (see pspec calibrate). "
    "The bundle's number if unset.",
)
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(pspec.__version__, prog_name="pspec")
@click.pass_context
def app(context: click.Context) -> None:
    """Speculative decoding with parallel drafters: check and run bundles.

    A program of its own makes them: see pspec-export --help
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command(context_settings=SETTINGS)
@click.argument("target")
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), help="Bundle folder to make."
)
@click.option("--drafter", type=click.Path(path_type=Path), help="Drafter directory.")
@click.option("--precision", default="fp32", show_default=True, help="fp32, int8 or int4 weights.")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    help="Fail below this share of tokens equal to fp32's (int8: 0.9, int4: 0.6).",
)
@click.option("--platform", default="generic", show_default=True, help="generic, likewise.")
@click.option("--engine", default="auto", show_default=True, help="Engine to prepare for, or none.")
@click.option(
    "--max-context", default=1024, show_default=True, help="Longest prompt and answer, in tokens."
)
@click.option("--nodes", default=8, show_default=True, help="Tree nodes of a verify call.")
@click.option("--batch", default=1, show_default=True, help="Rows of every graph.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, write nothing.")
@click.version_option(pspec.__version__, prog_name="pspec-export")
def export(engine: str, dry_run: bool, **options: Any) -> None:
    """Export TARGET (a Hugging Face folder, .gguf file, hub id, or `smollm2`) to a bundle.

    Example: pspec-export smollm2 --output smollm2-bundle
    """
    from pspec.runtime.engines import ENGINES

    known = ("auto", *ENGINES, "none")
    if engine not in known:
        raise PspecError(f"engine {engine!r} is not there: use one of {', '.join(known)}")
    with export_imports():
        from pspec.export.pipeline import export_bundle
        from pspec.export.request import ExportRequest, plan_export
        from pspec.show import Progress, show_parity, show_plan
    request = ExportRequest(**options | {"target": _target(options["target"]), "engine": engine})
    if dry_run:
        target, drafter, plan = plan_export(request)
        show_plan(request, target, drafter, plan)
        return
    with Progress() as progress:
        folder = export_bundle(request, progress)
    show_parity(folder)
    click.echo(f"bundle: {folder}")


@app.command(short_help="Build an engine from a bundle.")
@BUNDLE
@click.option("--engine", default="auto", show_default=True, help="Engine to build.")
@click.option("--stale", is_flag=True, help="Only if it is missing or no longer fits the bundle.")
def build(bundle: Path, engine: str, stale: bool) -> None:
    """Build an engine from the graphs of BUNDLE and put it into BUNDLE/engines.

    Engines are built by themselves where they are missing; this builds one anew.
    """
    from pspec.runtime.bundle import open_bundle
    from pspec.runtime.engines import BUILT, build_engine, choose_engine, is_current
    from pspec.show import Progress

    opened = open_bundle(bundle)
    chosen, why = choose_engine(engine, opened)
    if chosen not in BUILT:
        raise PspecError(
            f"engine {chosen} ({why}) needs no building; built are: {', '.join(BUILT)}"
        )
    if stale and is_current(opened):
        click.echo(f"{bundle}: engine {chosen} is current")
        return
    with Progress() as progress:
        folder = build_engine(opened, progress)
    click.echo(f"engine: {folder}")


@app.command(short_help="Check every hash and shape of a bundle.")
@BUNDLE
@click.option("--engine", default=None, help="Also run the graphs on this engine: parity.")
def verify(bundle: Path, engine: str | None) -> None:
    """Check every hash and shape of BUNDLE, and with --engine that its graphs compute the same."""
    from pspec.runtime.check import check_bundle

    for line in check_bundle(bundle, engine):
        click.echo(line)
    click.echo(f"{bundle}: ok")


@app.command(short_help="Answer one prompt, streaming.")
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
@NODES
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
    """Answer one prompt, streaming; a line of figures goes to standard error.

    Example: pspec generate smollm2-bundle --prompt "What is a token tree?"
    """
    from pspec.runtime.generate import GenerationConfig, Generator

    text = _prompt_text(prompt, prompt_file)
    config = GenerationConfig(stop_strings=stops, **settings)
    generator = Generator.open(bundle, engine=engine, threads=threads)
    request = text if raw else [{"role": "user", "content": text}]
    if as_json:
        click.echo(json.dumps(generator.generate(request, config).to_json(), ensure_ascii=False))
        return
    result = _echo(generator.stream_generate(request, config))
    click.echo(_stats_line(result), err=True)


@app.command(short_help="Talk to a bundle.")
@BUNDLE
@click.option("--system", help="System message.")
@click.option("--max-new-tokens", default=512, show_default=True)
@ENGINE
@THREADS
@NODES
def chat(
    bundle: Path, system: str | None, engine: str, threads: int | None, **settings: Any
) -> None:
    """Talk to BUNDLE; an empty line or Ctrl-D ends, /reset starts over."""
    from pspec.runtime.generate import GenerationConfig, Generator

    generator = Generator.open(bundle, engine=engine, threads=threads)
    config = GenerationConfig(**settings)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while line := _read_line():
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        answer = _echo(generator.stream_generate(messages, config)).text
        messages.append({"role": "assistant", "content": answer})


@app.command(name="calibrate", short_help="Measure what a bundle costs on this device.")
@BUNDLE
@ENGINE
@THREADS
@click.option(
    "--repeats", type=click.IntRange(1), default=10, show_default=True, help="Timed sweeps."
)
@AS_JSON
def calibrate_bundle(bundle: Path, as_json: bool, **options: Any) -> None:
    """Measure what BUNDLE's calls cost on this device, for --nodes auto, and keep it in BUNDLE.

    Draft and verify calls by tree size and cache length, and the host's part of a round.
    """
    from pspec.calibrate.store import NO_PICTURE, calibrate
    from pspec.progress import Watcher
    from pspec.show import Progress, show_calibration

    if as_json:
        curve, files = calibrate(bundle, **options, watcher=Watcher())
        click.echo(_calibration_json(curve, files))
        return
    with Progress() as progress:
        curve, files = calibrate(bundle, **options, watcher=progress)
    show_calibration(curve)
    click.echo("\n".join(map(str, files)))
    if not any(file.suffix == ".png" for file in files):
        click.echo(NO_PICTURE)


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
    _need_drafter(path)
    with export_imports():
        show_drafter(path, as_json)


@app.command(short_help="Say what this machine can do, and how to get the rest.")
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


@app.command(short_help="The whole path on a small model, with and without drafting.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("smollm2-demo"),
    show_default=True,
    help="Bundle folder; one that is there already is used.",
)
@click.option("--prompt", help="Question to answer instead of the demo's own.")
@click.option("--max-new-tokens", default=96, show_default=True)
def demo(output: Path, prompt: str | None, max_new_tokens: int) -> None:
    """Fetch SmolLM2-135M, export it with a drafter, and answer with and without speculation."""
    with export_imports():
        from pspec.demo import run_demo

        run_demo(output, prompt, max_new_tokens)


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError("give one of --prompt and --prompt-file")
    if file is None:
        assert prompt is not None
        text = prompt
    else:
        text = _read_prompt(file)
    if not text:
        raise PspecError("the prompt is empty: give it some text")
    return text


def _read_prompt(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PspecError(f"--prompt-file {file}: there is no such file") from error
    except OSError as error:
        raise PspecError(f"--prompt-file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PspecError(f"--prompt-file {file} is not UTF-8 text") from error


def _echo(stream: Iterator[Chunk]) -> Generation:
    """Show an answer while it comes, and return it."""
    try:
        while True:
            click.echo(next(stream).text, nl=False)
    except StopIteration as end:
        click.echo()
        result: Generation = end.value
        return result


def _stats_line(result: Generation) -> str:
    from pspec.show import tokens_per_second

    facts = [f"{len(result.token_ids)} tokens"]
    if result.stats.rounds:
        speed = tokens_per_second(result.stats)
        facts += [f"tau {result.stats.tau:.2f}", f"{speed:.1f} tokens/s without prefill"]
    return ", ".join([*facts, result.engine])


def _calibration_json(curve: Curve, files: list[Path]) -> str:
    import msgspec

    value = {"device": curve.device.key, "files": [str(file) for file in files], "curve": curve}
    return msgspec.json.encode(value).decode()


def _need_drafter(path: Path) -> None:
    """Refuse what is no drafter directory, before anything is imported to read one."""
    if (path.suffix.lower() == ".gguf" and path.is_file()) or _is_checkpoint(path):
        raise PspecError(
            f"{path} is a target, neither a bundle nor a drafter: make a bundle of it with "
            f"pspec-export {path} --output BUNDLE"
        )
    if not (path / "config.json").exists():
        fault = "is neither a bundle nor a drafter directory" if path.exists() else "is not there"
        raise PspecError(
            f"{path} {fault}: name a bundle (a folder made by pspec-export) or a drafter directory "
            "(config.json and model.safetensors)"
        )


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder holds a Hugging Face config."""
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config


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


def main() -> None:
    """Entry point of ``pspec``."""
    run(app, "pspec")


def export_main() -> None:
    """Entry point of ``pspec-export``."""
    run(export, "pspec-export")
