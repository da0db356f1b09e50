"""The benchmark beside other runtimes: what of it needs none of them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bundles import TinyBundle
from pspec.errors import ConfigError, PspecError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "peers"
# Generic names: importable while the folder is at the front, then only through these variables.
NAMES = ("protocol", "catalogue", "driver", "results", "install", "run")

sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
try:
    protocol, catalogue, driver, results, install, run = map(importlib.import_module, NAMES)
finally:
    sys.path.remove(str(FOLDER))
    sys.path.remove(str(FOLDER.parent))

FAKE = """
import sys, time
sys.path.insert(0, {folder!r})
from protocol import Answer, serve

def load(start):
    print("a library's greeting")
    if start.model == "broken":
        raise OSError("no such model")
    def generate(ids, count):
        if start.model == "slow":
            time.sleep(60)
        answer = [(ids[-1] + i + (start.mode == "lookup" and ids[0] == 13)) % 100
                  for i in range(count)]
        return Answer(0.5, {decode}, count - (start.model == "short"), answer, (count - 1) // 2)
    return generate, {{"threads": start.threads}}

serve(load, ("numpy",))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "fake_runner.py"
    decode = "0.1 if start.mode == 'lookup' else 0.2"
    script.write_text(FAKE.format(folder=str(FOLDER), decode=decode), encoding="utf-8")
    return [sys.executable, str(script)]


def start(model: str = "fine", mode: str = "plain") -> Any:
    return protocol.Start(model, mode, 1, 64, 5, 3)


def test_job_protocol(command: list[str], tmp_path: Path) -> None:
    with driver.Runner("fake", command, start(), tmp_path / "log", 60) as runner:
        assert runner.about["settings"] == {"threads": 1}
        assert set(runner.about["versions"]) == {"numpy"}
        answer = runner.generate([5, 7], 4)
        assert answer == protocol.Answer(0.5, 0.2, 4, [7, 8, 9, 10], 1)
        assert runner.generate([5, 8], 3).ids == [8, 9, 10]
    assert (tmp_path / "log").read_text(encoding="utf-8") == "a library's greeting\n"


def test_runner_is_stopped_between_jobs(command: list[str], tmp_path: Path) -> None:
    status = Path("/proc/{pid}/status")
    if not Path("/proc/self/status").is_file():
        pytest.skip("no /proc")
    with driver.Runner("fake", command, start(), tmp_path / "log", 60) as runner:
        for _ in range(2):
            text = Path(str(status).format(pid=runner._process.pid)).read_text(encoding="utf-8")
            assert "State:\tT" in text
            runner.generate([5, 7], 4)


def test_failures_of_a_runner_are_one_line(command: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(PspecError, match=r"failed: OSError: no such model.*log of the work"):
        driver.Runner("fake", command, start("broken"), log, 60)
    with pytest.raises(PspecError, match="fake, plain, ended"):
        driver.Runner("fake", [sys.executable, "-c", ""], start(), log, 60)
    with driver.Runner("fake", command, start("slow"), log, 60) as runner:
        runner._timeout = 0.2
        with pytest.raises(PspecError, match="said nothing"):
            runner.generate([1], 2)


def row(peer: str, mode: str, decode: float, **options: Any) -> Any:
    given = {"task": "rag", "place": 1, "repeat": 0, "prompt_tokens": 100, "prefill": 0.5}
    given |= {"rounds": 10, "ids": list(range(11))} | options
    return results.Run(peer, mode, decode=decode, **given)


def test_ratios_are_within_a_repetition() -> None:
    runs = [
        row("a", "plain", 1.0, task="context 64"),
        row("b", "plain", 0.5, task="context 64", ids=[0, 1, 2, *range(8)]),
        row("a", "plain", 4.0, task="context 64", repeat=1),
        row("b", "plain", 1.0, task="context 64", repeat=1, prefill=0.25),
    ]
    first, second = results.plain_results(runs, "a")
    assert (first.peer, second.peer) == ("b", "a")
    assert first.decode.median == 15.0
    assert first.decode_ratio.median == 1.0
    assert second.decode_ratio.median == pytest.approx((0.5 + 0.25) / 2)
    assert second.prefill_ratio.median == pytest.approx((1 + 0.5) / 2)
    assert (first.agreement, second.agreement) == (7, 11)
    assert "| context 64 | b | 15.0 [12.5, 17.5] | 1.00 [1.00, 1.00] |" in results.plain_table(
        [first, second]
    )


def test_speed_up_is_over_the_own_plain_decoding() -> None:
    runs = [
        row("a", "plain", 2.0),
        row("a", "lookup", 1.0, rounds=5),
        row("a", "plain", 2.0, place=2, task="summarization"),
        row("a", "lookup", 2.0, place=2, task="summarization", rounds=10, ids=[5] * 11),
        row("b", "plain", 1.0),
        row("b", "lookup", 2.0, rounds=None),
    ]
    found = {(one.task, one.peer): one for one in results.lookup_results(runs)}
    whole = found["all", "a"]
    assert whole.total == pytest.approx(4 / 3)
    assert whole.speedup.median == 1.5
    assert whole.tau == pytest.approx(20 / 15)
    assert whole.whole == pytest.approx(5 / 4)
    assert (whole.different, whole.answers) == (1, 2)
    assert found["rag", "a"].total == 2.0
    assert found["all", "b"].tau is None
    assert found["rag", "b"].total == 0.5
    assert "| all | b | 10.0 | 5.0 | 0.50 |" in results.lookup_table(found.values())


def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [row("a", "plain", 2.0), row("a", "lookup", 1.0)]
    plain = results.plain_results([row("a", "plain", 1.0, task="context 64")], "a")
    results.draw(plain, results.lookup_results(runs), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_fixed_prompts_are_fronts_of_long_ones() -> None:
    prompts = [run.Prompt("rag", n, list(range(n))) for n in (10, 30, 20)]
    chosen = run.fixed_length(prompts, 20, 3)
    assert [(one.task, one.place, len(one.ids)) for one in chosen] == [
        ("context 20", 30, 20),
        ("context 20", 20, 20),
        ("context 20", 30, 20),
    ]
    with pytest.raises(ConfigError, match="longest question has 30"):
        run.fixed_length(prompts, 31, 1)


def test_what_is_not_installed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ORT GenAI: not in .*install\.py"):
        run.chosen_peers(["ORT GenAI"], (), tmp_path)
    with pytest.raises(ConfigError, match="no peer in"):
        run.chosen_peers([], (), tmp_path)
    (only,) = run.chosen_peers([], (tmp_path,), tmp_path)
    assert only.name == "pspec"
    many = run.chosen_peers([], (tmp_path / "x", tmp_path / "y"), tmp_path)
    assert [peer.name for peer in many] == ["pspec x", "pspec y"]


def test_every_package_is_pinned() -> None:
    text = catalogue.CONSTRAINTS.read_text(encoding="utf-8")
    pinned = {line.partition("==")[0] for line in text.splitlines() if "==" in line}
    for peer in catalogue.PEERS.values():
        assert (FOLDER / peer.script).is_file()
        assert set(peer.packages) <= pinned


def test_a_conversion_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "model"
    with pytest.raises(ConfigError, match="failed, see above"):
        install.make_model("other", tmp_path, output, Path(sys.executable), [])
    assert not output.exists()
    output.mkdir()
    install.make_model("other", tmp_path, output, Path("not run"), [])


@pytest.mark.parametrize("script", [run, install])
def test_scripts_explain_themselves(script: Any) -> None:
    result = CliRunner().invoke(script.main, ["--help"])
    assert result.exit_code == 0
    assert "--work" in result.output


def test_driver_end_to_end(
    command: list[str], llama_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pspec beside a fake peer, over the tiny bundle."""
    words = "one two three four five six seven eight nine ten"
    rows = [
        {"question_id": i, "category": name, "turns": [f"{name} {words}"]}
        for i, name in enumerate(("rag", "summarization", "rag", "qa"))
    ]
    questions = tmp_path / "question.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    fake = catalogue.Peer("fake", "none", "", "fine", "none at all", ())
    monkeypatch.setattr(catalogue.Peer, "installed", lambda self, work: True)
    monkeypatch.setattr(run, "PEERS", {"fake": fake})
    own = catalogue.Peer.command
    monkeypatch.setattr(
        catalogue.Peer, "command", lambda self, w: command if self is fake else own(self, w)
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(run, "_SLACK", 0)
    arguments = ["--work", str(tmp_path / "work"), "--questions", str(questions), "--threads", "1"]
    arguments += ["--bundle", str(llama_bundle.folder), "--context", "8", "--repeats", "2"]
    arguments += ["--max-new-tokens", "6", "--per-task", "2", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(run.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output

    data = json.loads((tmp_path / "out/peers.json").read_bytes())
    assert {one["peer"] for one in data["peers"]} == {"pspec", "fake"}
    assert len(data["runs"]["plain"]) == 2 * 2
    assert len(data["runs"]["lookup"]) == 3 * 2 * 2
    assert len({len(one["ids"]) for one in data["runs"]["lookup"]}) == 1
    overall = {one["peer"]: one for one in data["lookup"] if one["task"] == "all"}
    assert overall["fake"]["total"] == pytest.approx(2.0)
    assert overall["pspec"]["different"] == 0
    assert overall["pspec"]["tau"] >= 1
    text = (tmp_path / "out/peers.md").read_text(encoding="utf-8")
    assert "## Prompt lookup" in text
    assert str(tmp_path) not in text + (tmp_path / "out/peers.json").read_text(encoding="utf-8")
