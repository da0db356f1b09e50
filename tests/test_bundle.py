"""The bundle on disk: what is in it, how large it is, and that it needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import torch

from bundles import TinyBundle, random_drafter
from commands import call, contents, copy_folder, export, read_manifest, seal
from pspec.errors import BundleError
from pspec.export.weights import write_weights
from pspec.models.checkpoint import load_target
from pspec.models.drafter_file import write_drafter
from pspec.models.initial import initial_config
from pspec.runtime.bundle import open_bundle, parse_manifest, write_manifest
from pspec.runtime.check import check_shapes, check_tensors
from pspec.runtime.generate import Generation, GenerationConfig, Generator
from pspec.runtime.manifest import GraphSpec, Manifest, TensorSpec
from tiny import SPECIAL, TEMPLATE, make_hf

MACHINE_PATH = re.compile(rb"/(?:work|farm|root|home|tmp|usr|opt|var)/\w|site-packages|\.py\b")
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tied_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied target of 4,096 tokens that lost its source, was moved and got another name.

    Its chat template names a special token.
    """
    work = tmp_path_factory.mktemp("tied")
    sizes: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 256, "tie_word_embeddings": True}
    _, target = make_hf("llama", work / "target", **sizes)
    (target / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE, encoding="utf-8")
    decoder = load_target(str(target)).decoder
    write_drafter(random_drafter(initial_config(decoder, slots=4)), work / "drafter")
    options = ("--drafter", work / "drafter", "--max-context", "64")
    assert export(target, "--output", work / "bundle", *options).status == 0
    shutil.rmtree(target)
    shutil.rmtree(work / "drafter")
    (work / "elsewhere").mkdir()
    return (work / "bundle").rename(work / "elsewhere" / "a new [bold] é")


# --- the manifest ---------------------------------------------------------------------------------


def test_manifest_round_trips(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    data = (llama_bundle.folder / "manifest.json").read_bytes()

    write_manifest(tmp_path, parse_manifest(data))

    assert (tmp_path / "manifest.json").read_bytes() == data


def test_layout_of_the_json_is_free(llama_bundle: TinyBundle) -> None:
    raw = json.loads((llama_bundle.folder / "manifest.json").read_bytes())
    again = json.dumps(dict(reversed(raw.items())), indent=4).encode()
    assert parse_manifest(again) == read_manifest(llama_bundle.folder)


def test_every_key_is_needed(llama_bundle: TinyBundle) -> None:
    raw = json.loads((llama_bundle.folder / "manifest.json").read_bytes())
    for key in raw:
        less = {name: value for name, value in raw.items() if name != key}
        with pytest.raises(BundleError, match=f"{key}|checksum"):
            parse_manifest(json.dumps(less).encode())


def test_no_key_is_unknown_at_any_depth(llama_bundle: TinyBundle) -> None:
    raw = json.loads((llama_bundle.folder / "manifest.json").read_bytes())
    places = [raw, raw["target"], raw["target"]["cache"], raw["drafter"], raw["plan"]]
    places += [raw["graphs"][0], raw["graphs"][0]["inputs"][0], raw["tensors"][0]]
    for place in places:
        place["surprise"] = 1
        with pytest.raises(BundleError, match="unknown field `surprise`"):
            parse_manifest(json.dumps(raw).encode())
        del place["surprise"]
    parse_manifest(json.dumps(raw).encode())


def without(manifest: Manifest, name: str) -> dict[str, Any]:
    files = {file: entry for file, entry in manifest.files.items() if file != name}
    return {"files": files}


def renamed(manifest: Manifest, name: str) -> dict[str, Any]:
    """The tokenizer under another name."""
    files = dict(manifest.files)
    files[name] = files.pop("tokenizer.json")
    return {"files": files}


def with_graphs(manifest: Manifest, keep: Callable[[GraphSpec], bool]) -> dict[str, Any]:
    return {"graphs": tuple(graph for graph in manifest.graphs if keep(graph))}


def with_plan(manifest: Manifest, **fields: Any) -> dict[str, Any]:
    return {"plan": msgspec.structs.replace(manifest.plan, **fields)}


def without_value(manifest: Manifest, side: str, name: str) -> dict[str, Any]:
    """No graph has this input or output."""
    return {
        "graphs": tuple(
            msgspec.structs.replace(
                graph, **{side: tuple(v for v in getattr(graph, side) if v.name != name)}
            )
            for graph in manifest.graphs
        )
    }


CONTRADICTIONS: dict[str, tuple[Callable[[Manifest], dict[str, Any]], str]] = {
    "no symbolic target": (
        lambda m: with_graphs(m, lambda graph: graph.role != "target" or not graph.is_symbolic),
        "no symbolic graph for the target",
    ),
    "no symbolic drafter": (
        lambda m: with_graphs(m, lambda graph: graph.role != "drafter" or not graph.is_symbolic),
        "no symbolic graph for the drafter",
    ),
    "no drafter graph": (
        lambda m: with_graphs(m, lambda graph: graph.role != "drafter"),
        "no symbolic graph for the drafter",
    ),
    "no graph": (lambda m: {"graphs": ()}, "no symbolic graph"),
    "no weights": (
        lambda m: without(m, "graphs/weights.data"),
        "graphs/weights.data is not among its files",
    ),
    "graph unlisted": (
        lambda m: without(m, "graphs/target.symbolic.onnx"),
        "graphs/target.symbolic.onnx is not among its files",
    ),
    "parent": (lambda m: renamed(m, "../x"), "'../x' is no place inside"),
    "parent within": (lambda m: renamed(m, "graphs/../../x"), "is no place inside"),
    "absolute": (lambda m: renamed(m, "/etc/hostname"), "'/etc/hostname' is no place inside"),
    "drive": (lambda m: renamed(m, "C:/x"), "'C:/x' is no place inside"),
    "backslash": (lambda m: renamed(m, "..\\x"), "is no place inside"),
    "nameless": (lambda m: renamed(m, ""), "'' is no place inside"),
    "no buckets": (lambda m: with_plan(m, buckets=()), "buckets"),
    "buckets fall": (lambda m: with_plan(m, buckets=(96, 48)), "buckets"),
    "no chunk": (lambda m: with_plan(m, chunk=0), "plan"),
    "no tokens": (lambda m: without_value(m, "inputs", "token_ids"), "has no token_ids"),
    "no answer": (lambda m: without_value(m, "outputs", "next_token"), "has no next_token"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_refused(
    llama_bundle: TinyBundle, tmp_path: Path, kind: str
) -> None:
    change, message = CONTRADICTIONS[kind]
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    manifest = read_manifest(bundle)
    write_manifest(bundle, msgspec.structs.replace(manifest, **change(manifest)))

    for command in ("verify", "inspect"):
        call(command, bundle).refused("manifest.json: ", message)
    call("generate", bundle, "--prompt", "x").refused("manifest.json: ", message)


def test_manifest_says_what_was_exported(llama_bundle: TinyBundle) -> None:
    manifest = read_manifest(llama_bundle.folder)
    config = llama_bundle.hf_model.config

    assert (manifest.schema_version, manifest.name) == (1, "target")
    assert (manifest.platform, manifest.precision) == ("generic", "fp32")
    assert manifest.target.vocab_size == config.vocab_size
    assert manifest.target.eos_token_ids == (config.eos_token_id,)
    assert manifest.drafter is not None
    assert (manifest.drafter.slots, manifest.drafter.shift) == (4, True)
    assert manifest.plan.buckets == (96,)
    assert {"pspec", "python", "torch", "onnx"} <= manifest.provenance.keys()


def test_manifest_hashes_every_other_file(llama_bundle: TinyBundle) -> None:
    found = contents(llama_bundle.folder).keys() - {"manifest.json"}
    assert read_manifest(llama_bundle.folder).files.keys() == found


# --- shapes and tensors ---------------------------------------------------------------------------


def altered(manifest: Manifest, index: int, side: str) -> Manifest:
    """The last dim of a graph's last input or output grown by one."""
    graph = manifest.graphs[index]
    specs: tuple[TensorSpec, ...] = getattr(graph, side)
    *dims, last = specs[-1].shape
    assert isinstance(last, int)
    wrong = msgspec.structs.replace(specs[-1], shape=(*dims, last + 1))
    graphs = list(manifest.graphs)
    graphs[index] = msgspec.structs.replace(graph, **{side: (*specs[:-1], wrong)})
    return msgspec.structs.replace(manifest, graphs=tuple(graphs))


def test_an_altered_shape_is_seen_in_any_static_graph(llama_bundle: TinyBundle) -> None:
    bundle = open_bundle(llama_bundle.folder)
    check_shapes(bundle)
    for index, graph in enumerate(bundle.manifest.graphs):
        for side in ("inputs", "outputs"):
            wrong = altered(bundle.manifest, index, side)
            name = re.escape(graph.file) if graph.sizes else "graph "
            with pytest.raises(BundleError, match=name):
                check_shapes(type(bundle)(bundle.folder, wrong))


def test_verify_names_the_graph_of_an_altered_shape(
    llama_bundle: TinyBundle, tmp_path: Path
) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    manifest = read_manifest(bundle)
    static = next(i for i, graph in enumerate(manifest.graphs) if graph.sizes)
    seal(bundle, graphs=altered(manifest, static, "outputs").graphs)

    call("verify", bundle).refused(manifest.graphs[static].file, "shape")


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("kind", ["fewer", "more", "other", "turned", "type"])
def test_other_inputs_or_outputs_are_seen(llama_bundle: TinyBundle, side: str, kind: str) -> None:
    bundle = open_bundle(llama_bundle.folder)
    graphs = list(bundle.manifest.graphs)
    index = next(i for i, graph in enumerate(graphs) if graph.sizes)
    specs = getattr(graphs[index], side)
    *others, last = specs
    wrong = {
        "fewer": others,
        "more": [*specs, msgspec.structs.replace(last, name="more")],
        "other": [*others, msgspec.structs.replace(last, name="other")],
        "turned": [*reversed(specs)],
        "type": [*others, msgspec.structs.replace(last, dtype="bool")],
    }[kind]
    graphs[index] = msgspec.structs.replace(graphs[index], **{side: tuple(wrong)})
    manifest = msgspec.structs.replace(bundle.manifest, graphs=tuple(graphs))

    with pytest.raises(BundleError, match=f"graph {re.escape(graphs[index].file)}: "):
        check_shapes(type(bundle)(bundle.folder, manifest))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "frob"},
        {"offset": -64},
        {"offset": 1 << 40},
        {"bytes": 4},
        {"shape": (1 << 20, 64)},
    ],
)
def test_a_tensor_outside_the_weight_file_is_seen(
    llama_bundle: TinyBundle, change: dict[str, object]
) -> None:
    bundle = open_bundle(llama_bundle.folder)
    check_tensors(bundle)
    first, *others = bundle.manifest.tensors
    wrong = msgspec.structs.replace(first, **change)
    manifest = msgspec.structs.replace(bundle.manifest, tensors=(wrong, *others))
    with pytest.raises(BundleError, match=re.escape(first.name)):
        check_tensors(type(bundle)(bundle.folder, manifest))


def test_static_graphs_follow_the_plan(llama_bundle: TinyBundle) -> None:
    manifest = read_manifest(llama_bundle.folder)
    plan = manifest.plan
    counts = {
        role: {count_of(graph) for graph in manifest.graphs if graph.role == role and graph.sizes}
        for role in ("target", "drafter")
    }
    assert counts == {
        "target": {1, plan.nodes, plan.chunk},
        "drafter": {plan.accepted, plan.chunk},
    }


def count_of(graph: GraphSpec) -> int:
    """Tokens a static graph takes."""
    return graph.sizes["nodes"] if graph.role == "target" else graph.sizes["accepted"]


# --- size -----------------------------------------------------------------------------------------


def test_every_byte_is_paid_once(tied_bundle: Path) -> None:
    manifest = read_manifest(tied_bundle)
    unique = sum({tensor.offset: tensor.bytes for tensor in manifest.tensors}.values())
    table = 4096 * 256 * 4

    assert int(manifest.provenance["weight_bytes"]) == unique
    assert table < unique < 2 * table
    assert sum(map(len, contents(tied_bundle).values())) <= 1.05 * unique


def test_a_shared_embedding_is_stored_once(tied_bundle: Path) -> None:
    tables = [t for t in read_manifest(tied_bundle).tensors if 4096 in t.shape]
    assert len({tensor.offset for tensor in tables}) == 1
    # Embedding and head of the target, and those of the drafter, need no more than two names.
    assert 1 <= len(tables) <= 2


def test_equal_tensors_are_stored_once(tmp_path: Path) -> None:
    one = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": one, "b": one.clone(), "turned": one.T, "flat": one.flatten(), "c": one + 1}

    stored = {tensor.name: tensor for tensor in write_weights(tensors.items(), tmp_path)}

    data = (tmp_path / "weights.data").read_bytes()
    for name, tensor in tensors.items():
        entry = stored[name]
        values = np.frombuffer(data, entry.dtype, tensor.numel(), entry.offset)
        assert np.array_equal(values.reshape(entry.shape), tensor.numpy())
        assert entry.offset % 64 == 0
    assert stored["a"].offset == stored["b"].offset
    assert len({entry.offset for entry in stored.values()}) == 4
    with pytest.raises(ValueError, match="are called a"):
        write_weights([("a", one), ("a", one + 1)], tmp_path)


def test_graphs_hold_no_weights(llama_bundle: TinyBundle) -> None:
    files = contents(llama_bundle.folder / "graphs")
    sizes = {name: len(data) for name, data in files.items() if name.endswith(".onnx")}
    assert len(sizes) == 7
    assert max(sizes.values()) < 40_000, sizes


# --- alone, anywhere ------------------------------------------------------------------------------


def test_no_file_names_a_place_on_this_machine(
    llama_bundle: TinyBundle, qwen3_bundle: TinyBundle, tied_bundle: Path
) -> None:
    for folder in (llama_bundle.folder, qwen3_bundle.folder, tied_bundle):
        found = {name: MACHINE_PATH.findall(data) for name, data in contents(folder).items()}
        assert not {name: places for name, places in found.items() if places}


def test_bundle_alone_can_chat(tied_bundle: Path) -> None:
    special = json.loads((tied_bundle / "special_tokens.json").read_bytes())
    assert special["bos_token"] == "<|im_start|>"
    generator = Generator.open(tied_bundle)

    text = generator.text.render_chat(HELLO)

    assert text.startswith("<|im_start|><|im_start|>user\nhello<|im_end|>")
    ids = [generate(generator, HELLO, draft=draft).token_ids for draft in ("auto", "off")]
    assert ids[0] == ids[1]
    assert len(ids[0]) > 1
    call("verify", tied_bundle, "--engine", "onnxruntime").went_well()


def test_a_moved_bundle_gives_the_same_answer(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    moved = copy_folder(llama_bundle.folder, tmp_path / "other" / "name.of its own")
    answers = [
        generate(Generator.open(folder), HELLO).token_ids for folder in (llama_bundle.folder, moved)
    ]
    assert answers[0] == answers[1]


def generate(
    generator: Generator, prompt: str | list[int] | list[dict[str, str]], **settings: object
) -> Generation:
    """Up to 48 tokens."""
    return generator.generate(prompt, GenerationConfig(max_new_tokens=48, **settings))  # type: ignore[arg-type]


# --- a vocabulary padded beyond the tokenizer -----------------------------------------------------


@pytest.mark.parametrize("draft", ["auto", "off"])
def test_ids_the_tokenizer_lacks_add_no_text(llama_bundle: TinyBundle, draft: str) -> None:
    generator = Generator.open(llama_bundle.folder)
    config = GenerationConfig(max_new_tokens=48, draft=draft)  # type: ignore[arg-type]
    known = generator.text.vocab_size
    assert known < generator.bundle.manifest.target.vocab_size

    chunks = list(generator.stream_generate("one two", config))

    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert any(token >= known for token in ids), "the test sees no such id"
    assert any(token < known for token in ids)
    assert "".join(chunk.text for chunk in chunks) == generator.text.decode(ids)


def test_a_stop_string_is_found_behind_such_an_id(llama_bundle: TinyBundle) -> None:
    generator = Generator.open(llama_bundle.folder)
    whole = generate(generator, "one two")
    unknown = next(i for i, t in enumerate(whole.token_ids) if t >= generator.text.vocab_size)
    before = generator.text.decode(whole.token_ids[:unknown])
    stop = whole.text[len(before) + 1 :][:2]
    assert len(stop) == 2

    for draft in ("auto", "off"):
        cut = generate(generator, "one two", stop_strings=(stop,), draft=draft)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


# --- stop strings that name a token ---------------------------------------------------------------


def test_a_special_token_stops_by_its_name(llama_bundle: TinyBundle) -> None:
    generator = Generator.open(llama_bundle.folder)
    specials = range(len(SPECIAL))
    answers = ((prompt, generate(generator, [prompt], eos_token_id=())) for prompt in range(3, 320))
    prompt, whole = next((p, a) for p, a in answers if set(a.token_ids[1:]) & set(specials))
    place = next(i for i, token in enumerate(whole.token_ids) if token in specials)
    name = SPECIAL[whole.token_ids[place]]

    cut = generate(generator, [prompt], eos_token_id=(), stop_strings=(name,))

    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: place + 1]


def test_an_ordinary_token_does_not_stop_by_its_name(llama_bundle: TinyBundle) -> None:
    # In a byte-level vocabulary a token's name is another text than its own.
    generator = Generator.open(llama_bundle.folder)
    whole = generate(generator, "one two")
    names = (generator.text.tokenizer.id_to_token(token) for token in whole.token_ids)
    name = next(name for name in names if name and name not in whole.text)

    assert generate(generator, "one two", stop_strings=(name,)).token_ids == whole.token_ids


def test_one_stop_string_stands_for_itself(llama_bundle: TinyBundle) -> None:
    # Not for its letters, nor for the special tokens whose names lie in it.
    generator = Generator.open(llama_bundle.folder)
    specials = set(range(len(SPECIAL)))
    answers = ((prompt, generate(generator, [prompt], eos_token_id=())) for prompt in range(3, 320))
    prompt, whole = next((p, a) for p, a in answers if set(a.token_ids) & specials and a.text)
    stop = whole.text[0] + "".join(SPECIAL)
    assert stop not in whole.text

    again = generate(generator, [prompt], eos_token_id=(), stop_strings=stop)

    assert (again.token_ids, again.text) == (whole.token_ids, whole.text)


# --- reports --------------------------------------------------------------------------------------


def test_the_three_parity_reports_agree(llama_bundle: TinyBundle) -> None:
    reports = llama_bundle.folder / "reports"
    rows = json.loads((reports / "parity.json").read_bytes())
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (reports / "parity.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    picture = ElementTree.parse(reports / "parity.svg").getroot()
    labels = [element.text for element in picture if element.tag.endswith("text")]

    graphs = [graph.file for graph in read_manifest(llama_bundle.folder).graphs]
    expected = [(graph, kind) for graph in graphs for kind in ("fixed", "random")]
    assert [(row["graph"], row["inputs"]) for row in rows] == expected
    assert all(row["passed"] for row in rows)
    assert all(0 <= row["error"] <= 1e-3 for row in rows)
    assert table[2:] == [
        [
            row["graph"],
            row["inputs"],
            f"{row['error']:.1e}",
            f"{row['agree']:.1%}",
            str(row["near_ties"]),
            "ok",
        ]
        for row in rows
    ]
    assert labels[1:] == [f"{graph} {kind}" for graph, kind in expected]
