"""The benchmark scripts: their arithmetic, and tiny runs of what is quick."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bundles import TinyBundle
from pspec.errors import ConfigError
from pspec.runtime.bundle import open_bundle
from pspec.runtime.decode import Stats
from pspec.runtime.engines import open_engine
from pspec.runtime.generate import Generator
from pspec.runtime.target import Target
from pspec.runtime.tree import Proposal, best_first

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
SCRIPTS = ("lossless", "loop", "export", "cost_curve", "engines", "precision", "batch")


def _load(name: str) -> Any:
    """A script under a name of its own: ``export`` is a folder of the package."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(FOLDER))
try:
    helpers = ("_measure", "_modes", "_questions", "_random_llama", "_reference")
    measure, modes, questions, random_llama, reference = map(importlib.import_module, helpers)
    lossless, loop, export, cost_curve, engines, precision, batch = map(_load, SCRIPTS)
finally:
    sys.path.remove(str(FOLDER))


def spec_bench(path: Path, per_category: int = 2) -> Path:
    categories = ("writing", "qa", "coding", "rag")
    rows = [
        {"question_id": 10 * i + j, "category": name, "turns": [f"{name} {j}", "never asked"]}
        for i, name in enumerate(categories)
        for j in range(per_category)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("script", [lossless, loop, export, cost_curve])
def test_every_script_explains_itself(script: Any) -> None:
    result = CliRunner().invoke(script.main, ["--help"])
    assert result.exit_code == 0
    assert "--output" in result.output


def test_readme_lists_every_script_with_options_that_exist() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"`python benchmarks/(\w+)\.py([^`]*)`", text)
    assert {name for name, _ in rows} == {p.stem for p in FOLDER.glob("[a-z]*.py")} == set(SCRIPTS)
    for name, arguments in rows:
        known = {opt for p in globals()[name].main.params for opt in p.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= known


def test_questions_are_the_first_of_each_task(tmp_path: Path) -> None:
    path = spec_bench(tmp_path / "question.jsonl")
    chosen = questions.select(questions.read_questions(path), 3)
    assert [(one.number, one.task) for one in chosen] == [
        (0, "mt-bench"),
        (1, "mt-bench"),
        (10, "qa"),
        (11, "qa"),
        (20, "mt-bench"),
        (30, "rag"),
        (31, "rag"),
    ]
    assert chosen[0].text == "writing 0"


def test_other_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"question\.jsonl"):
        questions.read_questions(path)


@pytest.mark.parametrize("depth", range(1, 6))
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("pair", [(0.6, 0.4), (0.9, 0.1), (0.51, 0.49)])
def test_second_path_is_as_deep_as_in_the_tree(
    nodes: int, depth: int, pair: tuple[float, float]
) -> None:
    ids = np.tile(np.array([1, 2], np.int32), (depth, 1))
    logprobs = np.log(np.tile(np.array(pair, np.float32), (depth, 1)))
    tree = best_first(0, Proposal(ids, logprobs), nodes, depth)
    on_path, deepest = {0}, 0
    for node in range(1, len(tree)):
        if tree.parents[node] in on_path and tree.ranks[node] == 1:
            on_path.add(node)
            deepest = tree.depths[node]
    assert modes.second_path_depth(nodes, depth, pair) == deepest


@pytest.mark.parametrize(
    ("mode", "tokens", "budget", "expected"),
    [
        ("plain", 4, 64, [1, 1, 1]),
        ("anti-oracle", 3, 64, [1, 1]),
        ("oracle", 1, 64, []),
        ("oracle", 14, 14, [6, 6, 1]),  # the budget ends it: the last tree has no room
        ("oracle", 12, 64, [6, 5]),  # an end-of-sequence token does, as the last drafted one
        ("oracle", 13, 64, [6, 6]),  # and here as the bonus
        ("second-best", 9, 9, [3, 3, 2]),
        ("second-best", 9, 64, [3, 3, 2]),
        ("second-best chain", 3, 64, [1, 1]),
        ("lookup", 9, 64, None),
    ],
)
def test_expected_blocks(mode: str, tokens: int, budget: int, expected: list[int] | None) -> None:
    assert modes.expected_blocks(mode, tokens, budget, nodes=8, slots=5) == expected


def test_comparison() -> None:
    asked = []

    def gap(context: list[int], tokens: tuple[int, int]) -> float:
        asked.append((list(context), tokens))
        return 5e-5 if context == [1] else 0.3

    assert lossless.compare([1, 2], [1, 2], "plain", gap).verdict == "identical"
    assert lossless.compare([1, 2, 9], [1, 3], "plain", gap).verdict == "near-tie"
    assert lossless.compare([1, 2, 9], [1, 2, 8], "plain", gap).verdict == "failure"
    assert asked == [([1], (2, 3)), ([1, 2], (9, 8))]
    shorter = lossless.compare([1, 2], [1, 2, 3], "transformers", gap)
    assert shorter.verdict == "failure"
    assert "transformers has 3" in shorter.note


def test_judgement_of_rounds() -> None:
    def gap(context: object, tokens: object) -> float:
        return 0.0

    stats = Stats(rounds=2, committed=4)
    given = modes.Answer([1, 2, 3, 4, 5], [3, 1], stats, 1.0)
    same = [1, 2, 3, 4, 5]
    assert lossless.judge("oracle", given, same, same, gap, [3, 1]).verdict == "identical"
    wrong = lossless.judge("oracle", given, same, same, gap, [4])
    assert wrong.verdict == "failure"
    assert "expected [4]" in wrong.notes[0]
    # After a near-tie the recording no longer fits: its rounds say nothing.
    other = [1, 2, 3, 4, 6]
    assert lossless.judge("oracle", given, other, same, gap, [4]).verdict == "near-tie"
    off = replace(given, stats=Stats(rounds=3, committed=4))
    assert lossless.judge("lookup", off, same, same, gap, None).verdict == "failure"


def test_rows_survive_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    store = lossless.Store(path, {"nodes": 8}, fresh=False)
    done = lossless.ModeRow([1], [1], "identical", [])
    store.add(lossless.Row(81, "qa", 5, 1.0, [1], {"plain": done}))
    with path.open("ab") as file:
        file.write(b'{"question": 82, "task"')
    again = lossless.Store(path, {"nodes": 8}, fresh=False)
    assert list(again.rows) == [81]
    assert again.rows[81].modes["plain"] == done
    again.add(lossless.Row(83, "rag", 5000, 1.0))
    assert list(lossless.Store(path, {"nodes": 8}, fresh=False).rows) == [81, 83]
    with pytest.raises(ConfigError, match="--fresh"):
        lossless.Store(path, {"nodes": 4}, fresh=False)
    assert not lossless.Store(path, {"nodes": 4}, fresh=True).rows


@pytest.mark.parametrize(
    ("count", "ties", "failures", "verdict"),
    [
        (60, 0, 0, True),
        (60, 1, 0, True),
        (60, 2, 0, False),
        (400, 2, 0, True),
        (400, 3, 0, False),
        (60, 0, 1, False),
    ],
)
def test_passing(count: int, ties: int, failures: int, verdict: bool) -> None:
    kinds = ["near-tie"] * ties + ["failure"] * failures
    kinds += ["identical"] * (count - len(kinds))
    rows = [
        lossless.Row(i, "qa", 5, 1.0, [1], {"plain": lossless.ModeRow([1, 2, 3], [1, 1], kind, [])})
        for i, kind in enumerate(kinds)
    ]
    lines = lossless.tally(rows, ("plain",))
    assert [line.task for line in lines] == ["qa", "all"]
    assert lines[-1].tau == 1.0
    assert lossless.passed(lines) is verdict


def test_table_and_spread() -> None:
    spread = measure.spread([3.0, 1.0, 2.0])
    assert (spread.median, spread.low, spread.high, spread.count) == (2.0, 1.5, 2.5, 3)
    assert measure.table(("mode", "ms"), [("plain", spread.text(1)), ("oracle", 4)]) == (
        "| mode | ms |\n| --- | ---: |\n| plain | 2.0 [1.5, 2.5] |\n| oracle | 4 |"
    )
    with pytest.raises(ValueError, match="1 cells under 2"):
        measure.table(("a", "b"), [("c",)])


def test_efficiency_is_one_where_only_engine_calls_cost() -> None:
    plain = loop.Run(0, 0, "plain", 10, 10, 0.0, 10.0, 0.0, 10.0, True)
    free = loop.Run(0, 0, "oracle", 10, 2, 1.0, 3.0, 0.0, 4.0, True)
    costly = loop.Run(0, 0, "oracle", 10, 2, 1.0, 3.0, 4.0, 8.0, True)
    assert loop.speedup(free, plain) == pytest.approx(2.5)
    assert loop.efficiency(free, plain) == pytest.approx(1.0)
    assert loop.efficiency(costly, plain) == pytest.approx(0.5)
    results = loop.summarise([plain, costly])
    assert [one.mode for one in results] == ["plain", "oracle"]
    assert results[1].tau == 5.0
    assert results[1].host.median == results[1].host_p95 == 2000.0
    assert "| oracle | 2 | 5.00 |" in loop.report(results, "title", "foot")


def test_batches_are_measured_and_compared(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    questions = spec_bench(tmp_path / "question.jsonl")
    arguments = [str(llama_bundle.folder), "--questions", str(questions), "--context", "64"]
    arguments += ["--rows", "3", "--repeats", "2", "--max-new-tokens", "6", "--limit", "5"]
    arguments += ["--threads", "1", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(batch.main, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out/batch.json").read_bytes())
    assert [one["rows"] for one in result["results"]] == [1, 3]
    assert [one["rows"] for one in result["runs"]] == [1, 3, 3, 1]
    assert all(one["identical"] == result["prompts"] == 5 for one in result["results"])
    assert result["results"][0]["busy"] == 1.0 < result["results"][1]["busy"] <= 3.0
    assert result["differences"] == []
    assert (tmp_path / "out/batch.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path) not in (tmp_path / "out/batch.md").read_text(encoding="utf-8")


def test_differences_between_batches_are_judged_by_their_gap(llama_bundle: TinyBundle) -> None:
    bundle = open_bundle(llama_bundle.folder)
    prompt = [5, 6, 7]
    decoder = batch.BatchDecoder(bundle, 1, 1)
    single = batch.measure(decoder, [prompt] * 3, 4)
    token = single.answers[0][1]
    other = replace(
        single,
        rows=2,
        answers=(
            single.answers[0],
            (single.answers[0][0], token + 1, *single.answers[0][2:]),
            single.answers[0][:2],
        ),
    )
    scores = batch.Scores(bundle, 1)
    changed, cut = batch.differences(other, single, [prompt] * 3, scores)
    assert (changed.prompt, changed.place) == (1, 1)
    assert changed.gap == pytest.approx(scores.gap([*prompt, single.answers[0][0]], [token + 1]))
    assert changed.gap > batch.NEAR_TIE
    assert scores.gap([*prompt, single.answers[0][0]], [token]) == 0.0
    assert (cut.prompt, cut.place, cut.gap) == (2, 2, None)
    tie = batch.Difference(2, 1, 1, 5e-5)
    _, worst = batch.summarise([single, other], [[], [changed, tie, cut]])
    assert (worst.identical, worst.near_ties, worst.different) == (0, 1, 2)
    text = batch.report([worst], [changed, cut], "title", "foot")
    assert "prompt 1, 2 rows: differs after 1 tokens, gap" in text
    assert "one just ends" in text
    with pytest.raises(ConfigError, match="no prompt fits 2 tokens"):
        batch.prompts_of(bundle, None, 64, 2)
    assert len(batch.PROMPTS) == len(set(batch.PROMPTS)) == 64


def test_random_llama_has_the_shape_of_llama_1b(tmp_path: Path) -> None:
    from pspec.models.checkpoint import load_target

    shards = random_llama._shards(random_llama.LlamaSize())
    sizes = [int(np.prod(shape)) for shard in shards for shape in shard.values()]
    assert sum(sizes) == 1_235_814_400
    size = random_llama.LlamaSize(300, 64, 96, 2, 4, 2, 512)
    count = random_llama.write_random_llama(tmp_path / "model", size)
    target = load_target(str(tmp_path / "model"))
    assert sum(tensor.numel() for tensor in target.decoder.state_dict().values()) == count
    assert target.config.eos_token_ids == (1,)
    assert target.config.rope.scaling is not None


def test_static_cache_and_engine_do_the_same_work(llama_bundle: TinyBundle) -> None:
    bundle = open_bundle(llama_bundle.folder)
    bucket = bundle.manifest.plan.buckets[0]
    ids = np.random.default_rng(0).integers(3, 250, bucket).tolist()
    prompt, new = ids[:-8], ids[-8:]
    engine = cost_curve.filled_engine(bundle, prompt, "auto", 1)
    steps = reference.StaticSteps(llama_bundle.hf_model, prompt, bucket)
    engine_call = cost_curve.engine_call("pspec", engine, new)
    torch_call = cost_curve.torch_call("transformers", steps, new)
    for call in (engine_call, torch_call):
        call.measure()
        assert len(call.seconds) == 1
    # Both are back where they were, however often they ran.
    torch_tokens = steps.step(cost_curve.torch.tensor([new])).argmax(-1)[0].tolist()
    engine_call.warm()
    assert engine.bind(8, 8).outputs["next_token"][0].tolist() == torch_tokens
    fresh = open_engine(bundle, "target", "auto", 1)
    last = [token for _, _, token in Target(fresh, bundle.manifest.plan).prefill(ids)][-1]
    assert last == torch_tokens[-1]


def test_frozen_verify_graphs_are_found_and_run(llama_bundle: TinyBundle) -> None:
    bundle = open_bundle(llama_bundle.folder)
    bucket = bundle.manifest.plan.buckets[0]
    engines = list(cost_curve.static_engines(bundle, bucket, bucket - 8, 1))
    assert [count for count, _ in engines] == [1, 8]
    calls = [cost_curve.engine_call("pspec", one, [5] * count) for count, one in engines]
    cost_curve.measure(calls, 2)
    first, second = cost_curve.costs(calls, bucket)
    assert first.relative == 1.0
    assert second.ms.count == 2
    with pytest.raises(ConfigError, match="--bucket 77"):
        cost_curve.check_buckets(bundle, [77], 8)


def test_cost_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [
        cost_curve.Cost(series, bucket, nodes, measure.spread([1.0, nodes]), 1.0)
        for series in ("pspec", "transformers")
        for bucket in (256, 1024)
        for nodes in (1, 8)
    ]
    cost_curve.draw(points, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "| 1024 | 8 |" in cost_curve.report(points, "title", "foot")


def test_lossless_end_to_end(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    path = spec_bench(tmp_path / "question.jsonl", per_category=1)
    lines = path.read_text(encoding="utf-8").splitlines()
    long = {"question_id": 99, "category": "rag", "turns": ["far too long " * 40]}
    path.write_text("\n".join([*lines, json.dumps(long)]) + "\n", encoding="utf-8")
    arguments = [str(llama_bundle.folder), "--target", str(llama_bundle.target_folder)]
    arguments += ["--questions", str(path), "--max-new-tokens", "16", "--threads", "1"]
    arguments += ["--output", str(tmp_path / "out")]

    first = CliRunner().invoke(lossless.main, [*arguments, "--per-task", "1"])
    assert first.exit_code == 0, first.output
    second = CliRunner().invoke(lossless.main, [*arguments, "--per-task", "2"])
    assert second.exit_code == 0, second.output
    assert "5 questions, 3 done before" in second.output

    result = json.loads((tmp_path / "out/lossless.json").read_bytes())
    assert result["passed"] is True
    overall = {line["mode"]: line for line in result["lines"] if line["task"] == "all"}
    assert set(overall) == set(modes.MODES)
    assert all(line["questions"] == line["identical"] == 4 for line in overall.values())
    assert overall["plain"]["tau"] == overall["anti-oracle"]["tau"] == 1.0
    assert overall["oracle"]["tau"] > overall["second-best"]["tau"] > 1.5
    assert any("rag 99: skipped" in remark for remark in result["remarks"])
    assert "Lossless: passed" in (tmp_path / "out/lossless.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in (tmp_path / "out/lossless.json").read_text(encoding="utf-8")


def test_lossless_refuses_other_weights(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    size = random_llama.LlamaSize(300, 64, 96, 2, 4, 2, 512)
    random_llama.write_random_llama(tmp_path / "other", size)
    manifest = open_bundle(llama_bundle.folder).manifest
    with pytest.raises(ConfigError, match="not what the bundle was exported from"):
        reference.check_same_weights(str(tmp_path / "other"), manifest)


def test_loop_measures_a_bundle(llama_bundle: TinyBundle) -> None:
    generator = Generator.open(llama_bundle.folder, threads=1)
    chosen = ("plain", "bundle", "oracle")
    runs = loop.measure(generator, ["one two"], chosen, 12, 2)
    assert [one.mode for one in runs] == ["plain", "bundle", "oracle", "bundle", "oracle", "plain"]
    assert all(one.same and one.tokens == 11 and one.seconds > 0 for one in runs)
    by_mode = {one.mode: one for one in loop.summarise(runs)}
    assert by_mode["bundle"].draft.median > 0
    assert by_mode["oracle"].tau == pytest.approx(11 / 3)


@pytest.mark.slow
def test_export_is_measured_by_stage(tmp_path: Path) -> None:
    size = random_llama.LlamaSize(300, 64, 96, 2, 4, 2, 512)
    random_llama.write_random_llama(tmp_path / "target", size)
    request = {"target": str(tmp_path / "target"), "output": str(tmp_path / "bundle")}
    result = export.run_exports({**request, "max_context": 64}, tmp_path, 1, "tiny")
    (once,) = result.exports
    assert [stage.name for stage in once.stages][:2] == ["imports", "load"]
    assert once.stages[-1].name == "publish"
    assert sum(stage.seconds for stage in once.stages) <= once.wall
    assert once.peak > result.imports > 1 << 27
    assert result.files.weights <= result.files.weights_data <= 1.05 * result.files.weights + 4096
    text = export.report(result, "foot")
    assert "peak over weights" in text
    assert str(tmp_path) not in text
