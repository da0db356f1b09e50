"""What the README promises exists: commands, options, files, models."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pspec import cli
from pspec.models.families import supported_families

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SETUP = "python3 -m venv .venv && .venv/bin/pip install -c constraints/cpu.txt -e"


def shell_lines() -> list[str]:
    """Lines of the README's shell blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def named_commands() -> list[str]:
    """Every `pspec ...` the README tells a reader to type, in blocks and in running text."""
    spans = [*shell_lines(), *re.findall(r"`(pspec[ -][^`]+)`", README)]
    found = {match[0] for span in spans if (match := re.search(r"\bpspec[ -].*$", span))}
    return sorted(found)


@cache
def help_of(program: str, command: str | None) -> str:
    """Help of a command, as plain text."""
    entry = "export_main" if program == "pspec-export" else "main"
    arguments = [command] if command else []
    done = subprocess.run(
        [sys.executable, "-c", f"from pspec.cli import {entry}; {entry}()", *arguments, "--help"],
        env={"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{program} {command}: {done.stderr}"
    return done.stdout


def test_two_commands_do_all_the_set_up() -> None:
    # .ci/run takes the second from here and runs it.
    assert f"{SETUP} '.[cpu,export]' && .venv/bin/pspec demo" in shell_lines()
    assert f"{SETUP} '.[dev]' && .venv/bin/pytest" in shell_lines()


@pytest.mark.parametrize("line", named_commands())
def test_commands_and_their_options_exist(line: str) -> None:
    program, *words = line.split()
    command = words[0] if program == "pspec" and not words[0].startswith("-") else None
    text = help_of(program, command)
    for option in re.findall(r"(?<=\s)--[a-z-]+", line):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{line}: no {option}"


@pytest.mark.parametrize("command", ["pspec-export", *cli.app.commands])
def test_the_table_of_commands_has_every_option(command: str) -> None:
    page = (ROOT / "docs" / "bundle.md").read_text(encoding="utf-8")
    start = f"| `{command} " if command == "pspec-export" else f"| `pspec {command}"
    (row,) = [line for line in page.splitlines() if line.startswith(start)]
    known = cli.export if command == "pspec-export" else cli.app.commands[command]
    options = {name for option in known.params for name in option.opts if name.startswith("--")}
    assert set(re.findall(r"--[a-z-]+", row)) == options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    files = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert not [link for link in files if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_the_text_exist(page: Path) -> None:
    folders = "src|models|export|runtime|calibrate|tests|benchmarks|docs|examples|constraints"
    pattern = rf"(?:(?:{folders}|\.ci)/[\w./-]*|[A-Z]+\.md|pyproject\.toml)"
    named = re.findall(rf"(?<![\w./-]){pattern}", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name.rstrip(".")).exists()]


def test_extras_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = re.findall(r"^\| `\[(\w+)\]` \|", README, re.MULTILINE)
    assert set(listed) == set(project["optional-dependencies"])


def test_supported_models_are_the_families_we_have() -> None:
    table = README.split("## Supported models")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(supported_families())


def test_no_figures_of_one_machine() -> None:
    # Measurements lie where the command that made them is recorded.
    assert not re.findall(r"\d\s?(?:ms|GB/s|tok/s|tokens/s|tokens per second|x faster)\b", README)
