"""What the commands print, and what they need to run."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bundles import TinyBundle
from commands import RUNTIME_ONLY, call, contents, copy_folder, export, read_manifest, seal, spawn
from pspec import cli, demo, show
from pspec.demo import MODES
from pspec.export.parity import ParityRow
from pspec.export.report import parity_files
from pspec.runtime.generate import GenerationConfig, Generator

PROMPT = "one two one two one"
HELPS = [("pspec", None), ("pspec-export", None), *(("pspec", name) for name in cli.app.commands)]


def answer(bundle: Path, *options: str) -> dict[str, Any]:
    """The object ``pspec generate --json`` prints."""
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "24", "--json", *options)
    value: dict[str, Any] = json.loads(call("generate", bundle, *arguments).went_well())
    return value


def without_times(value: Mapping[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    stats = {name: item for name, item in value["stats"].items() if not name.endswith("_ms")}
    return {**value, "stats": stats}


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "command"), HELPS)
def test_help_needs_no_library(program: str, command: str | None) -> None:
    arguments = [command] if command else []
    missing = (*RUNTIME_ONLY, "onnxruntime")

    text = spawn(*arguments, "--help", program=program, without=missing).went_well()

    assert text.startswith(f"Usage: {' '.join([program, *arguments])} [OPTIONS]")


def test_no_command_shows_the_help() -> None:
    assert call().went_well() == call("--help").went_well()


def test_version() -> None:
    for program in ("pspec", "pspec-export"):
        text = call("--version", program=program).went_well()
        assert text.startswith(f"{program}, version ")


def test_the_list_of_commands_is_whole() -> None:
    text = call("--help").went_well()
    assert "..." not in text.partition("Commands:")[2]
    assert "…" not in text
    assert "pspec-export" in text


# --- generate -------------------------------------------------------------------------------------


def test_generate_runs_where_nothing_can_export(llama_bundle: TinyBundle) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", "24", "--json")

    done = spawn("generate", llama_bundle.folder, *options, without=RUNTIME_ONLY)

    assert without_times(json.loads(done.went_well())) == without_times(answer(llama_bundle.folder))


def test_json_has_the_documented_keys(llama_bundle: TinyBundle) -> None:
    value = answer(llama_bundle.folder, "--raw")

    assert list(value) == ["text", "token_ids", "finish_reason", "usage", "stats"]
    assert list(value["usage"]) == ["prompt_tokens", "completion_tokens"]
    keys = "engine rounds drafted accepted committed tau accepted_by_slot"
    assert list(value["stats"]) == [
        *keys.split(),
        *("prefill_ms", "draft_ms", "verify_ms", "host_ms"),
    ]


def test_json_counts_agree(llama_bundle: TinyBundle) -> None:
    generator = Generator.open(llama_bundle.folder)
    value = answer(llama_bundle.folder, "--raw", "--draft", "lookup")
    stats = value["stats"]

    assert value["usage"]["prompt_tokens"] == len(generator.encode(PROMPT))
    assert value["usage"]["completion_tokens"] == len(value["token_ids"]) == 24
    assert value["finish_reason"] == "length"
    assert stats["engine"] == "onnxruntime"
    assert stats["committed"] == 23  # prefill's own token belongs to no round
    assert stats["tau"] == stats["committed"] / stats["rounds"]
    assert stats["accepted"] == stats["committed"] - stats["rounds"]
    assert sum(stats["accepted_by_slot"]) == stats["accepted"] <= stats["drafted"]
    assert all(stats[name] >= 0 for name in stats if name.endswith("_ms"))


@pytest.mark.parametrize("draft", ["auto", "bundle", "lookup"])
@pytest.mark.parametrize("raw", [True, False])
def test_drafting_changes_no_token(llama_bundle: TinyBundle, draft: str, raw: bool) -> None:
    kind = ["--raw"] if raw else []

    plain = answer(llama_bundle.folder, *kind, "--draft", "off")

    assert plain["stats"]["tau"] == 1.0
    assert plain["stats"]["drafted"] == 0
    drafted = answer(llama_bundle.folder, *kind, "--draft", draft)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]


@pytest.mark.parametrize("nodes", ["1", "2", "8"])
def test_tree_size_changes_no_token(llama_bundle: TinyBundle, nodes: str) -> None:
    expected = answer(llama_bundle.folder, "--draft", "off")["token_ids"]
    assert answer(llama_bundle.folder, "--nodes", nodes)["token_ids"] == expected


def test_raw_leaves_the_template_out(llama_bundle: TinyBundle) -> None:
    generator = Generator.open(llama_bundle.folder)

    chat = answer(llama_bundle.folder)["usage"]["prompt_tokens"]
    raw = answer(llama_bundle.folder, "--raw")["usage"]["prompt_tokens"]

    assert chat == len(generator.encode([{"role": "user", "content": PROMPT}]))
    assert raw == len(generator.encode(PROMPT)) < chat


def test_plain_output_is_the_text_and_a_line_feed(llama_bundle: TinyBundle) -> None:
    text = answer(llama_bundle.folder, "--raw")["text"]
    arguments = ("--prompt", PROMPT, "--raw", "--max-new-tokens", "24")
    done = call("generate", llama_bundle.folder, *arguments)
    assert (done.status, done.stdout) == (0, f"{text}\n")


@pytest.mark.parametrize("tokens", ["24", "0"])
def test_figures_go_to_standard_error(llama_bundle: TinyBundle, tokens: str) -> None:
    arguments = ("--prompt", PROMPT, "--draft", "off", "--max-new-tokens", tokens)
    done = call("generate", llama_bundle.folder, *arguments)
    rounds = r"tau 1\.00, [\d.]+ tokens/s without prefill, " if tokens == "24" else ""
    assert re.fullmatch(rf"{tokens} tokens, {rounds}onnxruntime\n", done.stderr)


def test_prompt_file_is_the_prompt(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")

    arguments = ("--prompt-file", file, "--max-new-tokens", "24", "--json")
    value = json.loads(call("generate", llama_bundle.folder, *arguments).went_well())

    assert without_times(value) == without_times(answer(llama_bundle.folder))


def test_stop_ends_the_text_before_it(llama_bundle: TinyBundle) -> None:
    whole = answer(llama_bundle.folder, "--raw")
    middle = len(whole["text"]) // 2
    stop = whole["text"][middle : middle + 2]
    shown = whole["text"][: whole["text"].index(stop)]

    cut = answer(llama_bundle.folder, "--raw", "--stop", "never to be seen", "--stop", stop)

    assert (cut["text"], cut["finish_reason"]) == (shown, "stop")
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert 0 < len(cut["token_ids"]) < len(whole["token_ids"])


def test_no_new_token_is_a_length(llama_bundle: TinyBundle) -> None:
    value = answer(llama_bundle.folder, "--max-new-tokens", "0")
    assert (value["text"], value["token_ids"], value["finish_reason"]) == ("", [], "length")


# --- chat -----------------------------------------------------------------------------------------


def test_chat_remembers_until_reset(llama_bundle: TinyBundle) -> None:
    generator = Generator.open(llama_bundle.folder)
    config = GenerationConfig(max_new_tokens=6)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "one two"}]
    first = generator.generate(messages, config).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "one two"}]
    second = generator.generate(messages, config).text
    assert first != second, "the test cannot see the history"
    typed = "one two\none two\n/reset\none two\n"
    options = ("--system", "be", "--max-new-tokens", "6")

    done = spawn("chat", llama_bundle.folder, *options, typed=typed, without=RUNTIME_ONLY)

    assert done.went_well() == f"> {first}\n> {second}\n> > {first}\n> \n"


def test_chat_ends_at_an_empty_line(llama_bundle: TinyBundle) -> None:
    assert spawn("chat", llama_bundle.folder, typed="\nhello\n").went_well() == "> "


# --- demo -----------------------------------------------------------------------------------------


def test_demo_answers_in_each_mode(llama_bundle: TinyBundle) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", "8")

    text = call("demo", "--output", llama_bundle.folder, *options).went_well()

    assert all(f"--- {name}" in text for _, name in MODES)
    assert "NO" not in text.split("same tokens")[1]
    assert text.splitlines()[-1].startswith("The drafter is untrained")


@pytest.mark.parametrize("kind", ["folder", "file", "below a file"])
def test_demo_checks_its_place_before_it_makes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(demo, "fetch_smollm2", lambda: pytest.fail("fetched"))
    output = tmp_path / "place"
    if kind == "folder":
        output.mkdir()
    (output / "mine" if kind == "folder" else output).write_text("mine")
    before = contents(tmp_path)

    done = call("demo", "--output", output / "deep" if kind == "below a file" else output)

    done.refused(str(output))
    assert "--force" not in done.stderr
    assert contents(tmp_path) == before


def test_demo_leaves_the_name_of_the_readme_alone() -> None:
    assert "[default: smollm2-demo]" in call("demo", "--help").went_well()


# --- inspect, verify, doctor, dry run -------------------------------------------------------------


def test_inspect_shows_a_bundle(llama_bundle: TinyBundle) -> None:
    text = spawn("inspect", llama_bundle.folder, without=RUNTIME_ONLY).went_well()

    assert "llama" in text
    assert "4 slots" in text
    for graph in read_manifest(llama_bundle.folder).graphs:
        assert graph.file in text


def test_inspect_prints_the_manifest(llama_bundle: TinyBundle) -> None:
    done = call("inspect", llama_bundle.folder, "--json")
    assert json.loads(done.went_well()) == json.loads(
        (llama_bundle.folder / "manifest.json").read_bytes()
    )


def test_inspect_shows_a_drafter(llama_bundle: TinyBundle) -> None:
    folder = llama_bundle.drafter_folder
    text = call("inspect", folder).went_well()
    value = json.loads(call("inspect", folder, "--json").went_well())

    assert value["config"] == json.loads((folder / "config.json").read_bytes())
    assert value["tensors"]
    assert all(name in text for name in value["tensors"])
    assert "block.hidden_size" in text  # nested fields are rows of their own
    assert not set("{}'") & set(text)
    assert max(map(len, text.splitlines())) <= 80


def test_verify_passes_a_good_bundle(llama_bundle: TinyBundle) -> None:
    text = spawn("verify", llama_bundle.folder, without=RUNTIME_ONLY).went_well()
    assert text.endswith(f"{llama_bundle.folder}: ok\n")
    manifest = read_manifest(llama_bundle.folder)
    assert text.splitlines()[:3] == [
        f"{len(manifest.files)} files have their sha256",
        f"{len(manifest.tensors)} tensors lie inside the weight file",
        f"{len(manifest.graphs)} graphs have the shapes of the plan",
    ]


def test_verify_asks_for_the_engine_first(tmp_path: Path) -> None:
    done = call("verify", tmp_path / "nowhere", "--engine", "frob")
    done.refused("engine 'frob'", "onnxruntime")
    assert done.stdout == ""


def test_verify_runs_every_static_graph(llama_bundle: TinyBundle) -> None:
    text = call("verify", llama_bundle.folder, "--engine", "onnxruntime").went_well()

    graphs = read_manifest(llama_bundle.folder).graphs
    for graph in graphs:
        assert (f"{graph.file}: largest difference" in text) != graph.is_symbolic
    assert text.endswith(": ok\n")


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_verify_sees_a_graph_that_computes_something_else(
    llama_bundle: TinyBundle, tmp_path: Path, role: str
) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    graphs = read_manifest(bundle).graphs
    graph = [graph for graph in graphs if graph.role == role and not graph.is_symbolic][-1]
    perturb(bundle / "graphs" / graph.file)
    call("verify", bundle).refused(graph.file)
    seal(bundle)

    call("verify", bundle).went_well()
    call("verify", bundle, "--engine", "onnxruntime").refused(graph.file, "differs by")


def perturb(file: Path) -> None:
    """Turn one sigmoid into a tanh: every shape and type stays."""
    with changed_graph(file) as graph:
        next(node for node in graph.node if node.op_type == "Sigmoid").op_type = "Tanh"


@contextlib.contextmanager
def changed_graph(file: Path) -> Iterator[onnx.GraphProto]:
    """A graph to change in place; its weights stay where they are."""
    model = onnx.load(file, load_external_data=False)
    yield model.graph
    file.write_bytes(model.SerializeToString())


def make(graph: onnx.GraphProto, output: str, op: str, *more: onnx.TensorProto) -> None:
    """Pass an output through one more operator."""
    node = next(node for node in graph.node if output in node.output)
    node.output[list(node.output).index(output)] = f"{output}_before"
    graph.initializer.extend(more)
    names = [tensor.name for tensor in more]
    graph.node.append(helper.make_node(op, [f"{output}_before", *names], [output]))


def not_finite(graph: onnx.GraphProto) -> None:
    make(graph, "logits", "Mul", helper.make_tensor("bad", TensorProto.FLOAT, [], [float("nan")]))


def other_token(graph: onnx.GraphProto) -> None:
    make(graph, "next_token", "Sub", helper.make_tensor("bad", TensorProto.INT32, [], [1]))


def other_candidate(graph: onnx.GraphProto) -> None:
    make(graph, "draft_ids", "Sub", helper.make_tensor("bad", TensorProto.INT32, [], [1]))


def renamed_output(graph: onnx.GraphProto) -> None:
    make(graph, "logits", "Identity")
    next(value for value in graph.output if value.name == "logits").name = "logits_before"


def output_gone(graph: onnx.GraphProto) -> None:
    graph.output.remove(next(value for value in graph.output if value.name == "next_token"))


def output_left_over(graph: onnx.GraphProto) -> None:
    make(graph, "logits", "Identity")
    graph.output.append(helper.make_tensor_value_info("logits_before", TensorProto.FLOAT, None))


def renamed_input(graph: onnx.GraphProto) -> None:
    next(value for value in graph.input if value.name == "token_ids").name = "words"
    for node in graph.node:
        node.input[:] = ["words" if name == "token_ids" else name for name in node.input]


def blind_branches(graph: onnx.GraphProto) -> None:
    """A static graph that takes every tree for a chain."""
    mask = next(value for value in graph.input if value.name == "tree_mask")
    shape = [dim.dim_value for dim in mask.type.tensor_type.shape.dim]
    chain = np.broadcast_to(np.tri(shape[-1], dtype=np.bool_), shape)
    graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(chain), "chain"))
    for node in graph.node:
        node.input[:] = ["chain" if name == "tree_mask" else name for name in node.input]


GRAPHS: dict[str, tuple[str, Callable[[onnx.GraphProto], None], tuple[str, ...]]] = {
    "not finite": ("target.n8", not_finite, ("logits differs by inf",)),
    "other tokens": ("target.n8", other_token, ("next_token differs in 8 of 8 ids",)),
    "other candidates": ("drafter.a5", other_candidate, ("draft_ids differs in",)),
    "renamed output": ("target.n8", renamed_output, ("output logits_before", "manifest")),
    "output gone": ("target.n8", output_gone, ("no output next_token",)),
    "output left over": ("target.n8", output_left_over, ("output logits_before", "manifest")),
    "renamed input": ("target.n8", renamed_input, ("input words", "manifest")),
    "branches unseen": ("target.n8", blind_branches, ("differs by",)),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_verify_sees_a_faulty_graph(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    name, change, names = GRAPHS[kind]
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    (file,) = (bundle / "graphs").glob(f"{name}.*.onnx")
    with changed_graph(file) as graph:
        change(graph)
    seal(bundle)

    call("verify", bundle).went_well()
    call("verify", bundle, "--engine", "onnxruntime").refused(file.name, *names)


@pytest.mark.parametrize("change", [renamed_output, output_gone, output_left_over, renamed_input])
def test_a_graph_that_does_not_fit_the_manifest_is_not_run(
    llama_bundle: TinyBundle, tmp_path: Path, change: Callable[[onnx.GraphProto], None]
) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    with changed_graph(bundle / "graphs" / "target.symbolic.onnx") as graph:
        change(graph)
    seal(bundle)

    done = call("generate", bundle, "--prompt", "x", "--engine", "standard")
    done.refused("target.symbolic.onnx does not fit the manifest", "put")


def test_a_graph_that_fails_when_it_runs_is_one_line(
    llama_bundle: TinyBundle, tmp_path: Path
) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    with changed_graph(bundle / "graphs" / "target.symbolic.onnx") as graph:
        mask = next(value for value in graph.input if value.name == "tree_mask")
        mask.type.tensor_type.shape.dim[1].dim_value = 7
    seal(bundle)

    done = call("generate", bundle, "--prompt", "x", "--engine", "standard")
    done.refused("onnxruntime cannot run target.symbolic.onnx", "tree_mask")


def test_doctor_reports() -> None:
    report = json.loads(call("doctor", "--json").went_well())
    assert "onnxruntime" in report["runs"]
    text = call("doctor").went_well()
    assert all(row["name"] in text for row in report["rows"])


def test_parity_table_fits_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["target.symbolic", "target.n256.s131072", "drafter.a256.s131072"]
    rows = [ParityRow(f"{name}.onnx", "random", 1.2e-4, 1.0, 12, True) for name in names]
    parity_files(rows, tmp_path / "reports")
    monkeypatch.setattr(show.console, "width", 80)

    with show.console.capture() as output:
        show.show_parity(tmp_path)

    lines = output.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(names) + 5  # no row takes two lines
    assert all(name in output.get() for name in names)


def test_dry_run_shows_the_plan_and_writes_nothing(
    llama_bundle: TinyBundle, tmp_path: Path
) -> None:
    output = tmp_path / "new" / "bundle"
    options = ("--drafter", llama_bundle.drafter_folder, "--output", output, "--nodes", "12")

    text = export(llama_bundle.target_folder, *options, "--max-context", "200", "--dry-run")

    facts = dict(
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.went_well().splitlines()
        if line.count("│") == 3
    )
    assert (facts["target"], facts["drafter"][-7:]) == ("target, llama", "4 slots")
    assert (facts["nodes"], facts["cache buckets"], facts["graphs"]) == ("12", "200", "7")
    assert not list(tmp_path.iterdir())


def test_own_warnings_are_shown_when_all_goes_well(
    llama_bundle: TinyBundle, tmp_path: Path
) -> None:
    target = copy_folder(llama_bundle.target_folder, tmp_path / "target")
    (target / "stray.safetensors").write_bytes(b"")

    done = export(target, "--output", tmp_path / "bundle", "--max-context", "32", "--dry-run")

    assert done.status == 0
    assert done.stderr.startswith("WARNING: ")
    assert "stray.safetensors" in done.stderr


def test_third_parties_are_silent(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    chatter = """
import logging, warnings
import pspec.export.request as request
real = request.load_target
def load_target(source):
    warnings.warn("chatter", FutureWarning)
    logging.getLogger("third.party").warning("chatter")
    return real(source)
request.load_target = load_target
"""
    arguments = ("--output", tmp_path / "bundle", "--max-context", "32", "--dry-run")

    for target in (llama_bundle.target_folder, tmp_path):
        done = spawn(target, *arguments, program="pspec-export", prelude=chatter)
        assert "chatter" not in done.stdout + done.stderr
        assert done.status == (2 if target == tmp_path else 0)


def test_export_without_its_libraries_names_the_extra(tmp_path: Path) -> None:
    arguments = ("somewhere", "--output", tmp_path / "bundle")
    done = spawn(*arguments, program="pspec-export", without=["torch"])
    done.refused("torch is not installed", "pip install 'pspec-toolkit[export,cpu]'")


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("verify", "--engine", "auto")])
def test_running_without_an_engine_names_the_extra(
    llama_bundle: TinyBundle, command: tuple[str, ...]
) -> None:
    name, *options = command
    done = spawn(name, llama_bundle.folder, *options, without=["onnxruntime"])
    done.refused("onnxruntime", "pip install 'pspec-toolkit[cpu]'")
