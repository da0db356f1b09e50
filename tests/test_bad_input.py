"""Everything a user can get wrong: status 2, one line that names it, and nothing half-written."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from bundles import TinyBundle, random_drafter
from commands import (
    Done,
    call,
    command_line,
    contents,
    copy_folder,
    environment,
    export,
    read_manifest,
    seal,
    spawn,
)
from pspec.errors import BundleError, PspecError
from pspec.export import pipeline
from pspec.export.assemble import assemble_graph
from pspec.export.pipeline import export_bundle
from pspec.export.request import ExportRequest
from pspec.export.trace import TracedStage, trace_stages
from pspec.export.weights import write_weights
from pspec.models.drafter import Drafter
from pspec.models.drafter_file import read_drafter_config, write_drafter
from pspec.models.graph import GraphModel
from pspec.progress import Watcher
from pspec.runtime.bundle import parse_manifest
from tiny import make_tokenizer

SIZES = ("--max-context", "96", "--nodes", "8")
Damage = Callable[[Path], object]


# --- targets --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(llama_bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of the bundle in several weight files."""
    folder = tmp_path_factory.mktemp("sharded") / "target"
    llama_bundle.hf_model.save_pretrained(folder, max_shard_size="200KB")
    make_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-0000*.safetensors"))) > 2
    return folder


def shard(folder: Path) -> Path:
    """The second weight file."""
    return sorted(folder.glob("model-*.safetensors"))[1]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def change_json(path: Path, **fields: object) -> None:
    """Set fields of a JSON file; an ellipsis removes one."""
    value = json.loads(path.read_bytes()) | fields
    kept = {name: item for name, item in value.items() if item is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")


def configure(**fields: object) -> Damage:
    """Damage that sets fields of ``config.json``."""
    return lambda folder: change_json(folder / "config.json", **fields)


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    """Damage that changes the tensors of ``model.safetensors``."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def add_tokens(folder: Path) -> None:
    """More tokens than the embedding has rows."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra{number}>" for number in range(60)])
    tokenizer.save_pretrained(folder)


def drop_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


MLP = "model.layers.1.mlp.up_proj.weight"
TARGETS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "tensor missing": (change_tensors(lambda tensors: tensors.pop(MLP)), (MLP, "missing")),
    "tensor left over": (
        change_tensors(lambda tensors: tensors.update({f"{MLP}_2": torch.zeros(3)})),
        (f"{MLP}_2",),
    ),
    "tensor misshapen": (
        change_tensors(lambda tensors: tensors.update({MLP: torch.zeros(96, 65)})),
        (MLP, "[96, 65]", "[96, 64]"),
    ),
    "tensor not finite": (
        change_tensors(lambda tensors: tensors[MLP].fill_(torch.nan)),
        (MLP, "NaN"),
    ),
    "weights cut": (lambda folder: cut_short(folder / "model.safetensors"), ("model.safetensors",)),
    "weights empty": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        ("model.safetensors",),
    ),
    "weights gone": (lambda folder: (folder / "model.safetensors").unlink(), ("safetensors",)),
    "family": (configure(model_type="frob"), ("'frob'", "llama", "qwen3")),
    "rope": (
        configure(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("'yarn'", "llama3"),
    ),
    "quantised": (
        configure(quantization_config={"quant_method": "gptq", "bits": 4}),
        ("quantization_config",),
    ),
    "absurdly deep": (configure(num_hidden_layers=10**9), ("1000000000 layers", "tensors")),
    "field unknown": (configure(secret_scale=2.0), ("'secret_scale'",)),
    "field missing": (configure(hidden_size=...), ("hidden_size",)),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
    "config gone": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "tokenizer too large": (add_tokens, ("339", "vocab_size 320")),
    "tokenizer gone": (drop_tokenizer, ("tokenizer",)),
    "tokenizer damaged": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        ("tokenizer.json",),
    ),
}


def refuse_target(target: Path, tmp_path: Path, *names: str) -> None:
    output = tmp_path / "bundle"
    export(target, "--output", output, *SIZES).refused(*names)
    assert not leftovers(output)


def leftovers(output: Path) -> list[str]:
    """What an export may have left in the place of its output or beside it."""
    return sorted(path.name for path in output.parent.glob("*") if output.name in path.name)


@pytest.mark.parametrize("kind", TARGETS)
def test_bad_target(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    damage, names = TARGETS[kind]
    target = copy_folder(llama_bundle.target_folder, tmp_path / "target")
    damage(target)
    refuse_target(target, tmp_path, *names)


@pytest.mark.parametrize("damage", [Path.unlink, cut_short], ids=["missing", "truncated"])
def test_bad_shard(sharded: Path, tmp_path: Path, damage: Damage) -> None:
    target = copy_folder(sharded, tmp_path / "target")
    damage(shard(target))
    refuse_target(target, tmp_path, shard(sharded).name)


def test_no_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in (tmp_path / "nowhere", tmp_path / "nowhere.gguf", tmp_path / "file"):
        refuse_target(name, tmp_path, name.name)


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    arguments = ("nobody/nothing", "--output", tmp_path / "bundle")
    spawn(*arguments, program="pspec-export").refused("nobody/nothing", "folder")


@pytest.mark.parametrize("kind", ["tensor missing", "family", "tokenizer gone"])
def test_bad_target_in_a_process_of_its_own(
    llama_bundle: TinyBundle, tmp_path: Path, kind: str
) -> None:
    damage, names = TARGETS[kind]
    target = copy_folder(llama_bundle.target_folder, tmp_path / "target")
    damage(target)
    # A warning of our own must not stand beside the error.
    (target / "stray.safetensors").write_bytes(b"")
    done = spawn(target, "--output", tmp_path / "bundle", *SIZES, program="pspec-export")
    done.refused(*names)


# --- drafters -------------------------------------------------------------------------------------


def other_drafter(**fields: Any) -> Damage:
    """Damage that puts a whole drafter of another config in the place."""

    def damage(folder: Path) -> None:
        config = read_drafter_config(folder)
        block = replace(config.block, **fields.pop("block", {}))
        drafter: Drafter = random_drafter(replace(config, block=block, **fields))
        write_drafter(drafter, folder)

    return damage


def a_drafter_tensor(folder: Path) -> str:
    return sorted(load_file(folder / "model.safetensors"))[0]


DRAFTERS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "vocabulary": (other_drafter(target_vocab_size=321), ("target_vocab_size", "321", "320")),
    "hidden size": (
        other_drafter(target_hidden_size=32, block={"hidden_size": 32}),
        ("target_hidden_size", "32", "64"),
    ),
    "boundary": (other_drafter(features=(1, 3)), ("boundary 3", "0..2")),
    "field unknown": (configure(surprise=1), ("`surprise`", "config.json")),
    "field missing": (configure(slots=...), ("`slots`",)),
    "field contradictory": (configure(shift=False), ("shift",)),
    "rope unknown": (configure(rope={"theta": 1e4, "kind": "yarn"}), ("`kind`",)),
    "version newer": (configure(version=99), ("version is 99", "1")),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
    "config gone": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "weights cut": (lambda folder: cut_short(folder / "model.safetensors"), ("model.safetensors",)),
    "weights gone": (lambda folder: (folder / "model.safetensors").unlink(), ("safetensors",)),
    "tensor left over": (
        change_tensors(lambda tensors: tensors.update({"more": torch.zeros(3)})),
        ("more",),
    ),
}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_bad_drafter(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    damage, names = DRAFTERS[kind]
    drafter = copy_folder(llama_bundle.drafter_folder, tmp_path / "drafter")
    damage(drafter)
    refuse_drafter(llama_bundle, drafter, tmp_path, *names)


@pytest.mark.parametrize("kind", ["missing", "misshapen"])
def test_bad_drafter_tensor(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    drafter = copy_folder(llama_bundle.drafter_folder, tmp_path / "drafter")
    for name in load_file(drafter / "model.safetensors"):
        damaged = copy_folder(drafter, tmp_path / name)
        change_tensors(
            lambda tensors, name=name: (  # type: ignore[misc]
                tensors.pop(name)
                if kind == "missing"
                else tensors.update({name: torch.zeros(3, 5, 7)})
            )
        )(damaged)
        call("inspect", damaged).refused(name)
    refuse_drafter(llama_bundle, tmp_path / name, tmp_path, name)


def refuse_drafter(bundle: TinyBundle, drafter: Path, tmp_path: Path, *names: str) -> None:
    output = tmp_path / "bundle"
    done = export(bundle.target_folder, "--drafter", drafter, "--output", output, *SIZES)
    done.refused(*names)
    assert not leftovers(output)


# --- bundles --------------------------------------------------------------------------------------


def refuse_bundle(bundle: Path, *names: str, every_command: bool = True) -> None:
    """No command works with a damaged bundle."""
    call("verify", bundle).refused(*names)
    if every_command:
        call("generate", bundle, "--prompt", "x", "--json").refused(*names)
        call("chat", bundle).refused(*names)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_in_any_file(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    for name in read_manifest(bundle).files:
        path = bundle / name
        for position in (0, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, position)
            refuse_bundle(bundle, name, "sha256", every_command=position == 0)
            flip(path, position)
    call("verify", bundle).went_well()


def test_a_flipped_byte_in_the_manifest(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    data = bytearray((bundle / "manifest.json").read_bytes())
    for position in range(0, len(data) - 1, 7):
        data[position] ^= 1
        with pytest.raises(BundleError):
            parse_manifest(bytes(data))
        data[position] ^= 1
    for position in (0, len(data) // 3, data.index(b'"tensors"') + 3):
        flip(bundle / "manifest.json", position)
        refuse_bundle(bundle, "manifest.json")
        flip(bundle / "manifest.json", position)
    call("verify", bundle).went_well()


@pytest.mark.parametrize("kind", ["missing", "truncated", "longer", "a folder"])
def test_any_file_damaged(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    for name in [*read_manifest(bundle).files, "manifest.json"]:
        path = bundle / name
        data = path.read_bytes()
        path.unlink()
        if kind == "a folder":
            path.mkdir()
        elif kind != "missing":
            path.write_bytes(data[:-1] if kind == "truncated" else data + b"\0")
        # The manifest's last byte is a line feed, which says nothing.
        if (name, kind) != ("manifest.json", "truncated"):
            refuse_bundle(bundle, Path(name).name, every_command=name == "tokenizer.json")
        if kind == "a folder":
            path.rmdir()
        path.write_bytes(data)
    call("verify", bundle).went_well()


MANIFESTS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "newer": (lambda path: change_json(path, schema_version=2), ("version 2", "update pspec")),
    "older": (lambda path: change_json(path, schema_version=0), ("version 0", "export again")),
    "unversioned": (lambda path: change_json(path, schema_version=...), ("schema_version",)),
    "field unknown": (lambda path: change_json(path, surprise=1), ("`surprise`",)),
    "field missing": (lambda path: change_json(path, plan=...), ("`plan`",)),
    "field of another type": (lambda path: change_json(path, plan=[]), ("plan",)),
    "value changed": (lambda path: change_json(path, name="other"), ("checksum",)),
    "no JSON": (lambda path: path.write_text("manifest"), ("schema_version",)),
    "no object": (lambda path: path.write_text("[1]"), ("schema_version",)),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), ("schema_version",)),
    "empty": (lambda path: path.write_bytes(b""), ("schema_version",)),
    "half": (lambda path: path.write_bytes(path.read_bytes()[:5000]), ("schema_version",)),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_bad_manifest(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    damage, names = MANIFESTS[kind]
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    damage(bundle / "manifest.json")
    refuse_bundle(bundle, "manifest.json", *names)
    call("inspect", bundle).refused("manifest.json", *names)


def test_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for name in ("nowhere", "file", "folder"):
        refuse_bundle(tmp_path / name, name, "is no bundle", "pspec-export")
        fault = "is not there" if name == "nowhere" else "neither a bundle nor a drafter"
        call("inspect", tmp_path / name).refused(name, fault, "pspec-export", "config.json")


def test_inspect_says_what_to_do_with_a_target(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for target in (llama_bundle.target_folder, tmp_path / "model.gguf"):
        call("inspect", target).refused(f"{target} is a target", f"pspec-export {target} --output")


def test_bad_bundle_in_a_process_of_its_own(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    flip(bundle / "graphs" / "weights.data", 70_000)
    for arguments in (("verify", bundle), ("generate", bundle, "--prompt", "x"), ("chat", bundle)):
        spawn(*arguments).refused("graphs/weights.data", "sha256")


def test_a_graph_no_engine_can_load(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    (bundle / "graphs" / "target.symbolic.onnx").write_bytes(b"no protobuf")
    seal(bundle)
    spawn("generate", bundle, "--prompt", "x").refused("target.symbolic.onnx")
    spawn("verify", bundle, "--engine", "onnxruntime").refused("target.symbolic.onnx")


# --- requests -------------------------------------------------------------------------------------


REQUESTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prompt too long": (("--prompt", "word " * 96), ("prompt", "96", "95", "--max-context")),
    "prompt empty": (("--prompt", ""), ("prompt is empty",)),
    "prompt missing": ((), ("--prompt", "--prompt-file")),
    "two prompts": (("--prompt", "x", "--prompt-file", "y"), ("--prompt", "--prompt-file")),
    "prompt file missing": (
        ("--prompt-file", "nowhere.txt"),
        ("--prompt-file nowhere.txt: there is no such file",),
    ),
    "option unknown": (("--prompt", "x", "--frob"), ("--frob",)),
    "option's value missing": (("--prompt", "x", "--nodes"), ("--nodes",)),
    "temperature": (("--prompt", "x", "--temperature", "0.7"), ("temperature 0.7", "not there")),
    "temperature no number": (("--prompt", "x", "--temperature", "warm"), ("'warm'",)),
    "temperature nan": (("--prompt", "x", "--temperature", "nan"), ("temperature nan",)),
    "budget negative": (("--prompt", "x", "--max-new-tokens", "-1"), ("max_new_tokens", "-1")),
    "no nodes": (("--prompt", "x", "--nodes", "0"), ("nodes 0",)),
    "too many nodes": (("--prompt", "x", "--nodes", "9"), ("nodes 9", "1..8")),
    "no threads": (("--prompt", "x", "--threads", "0"), ("--threads", "0")),
    "too many threads": (("--prompt", "x", "--threads", "1025"), ("--threads", "1025")),
    "draft unknown": (("--prompt", "x", "--draft", "frob"), ("'frob'", "lookup")),
    "engine unknown": (("--prompt", "x", "--engine", "frob"), ("'frob'", "onnxruntime")),
    "stop empty": (("--prompt", "x", "--stop", ""), ("stop",)),
    "argument left over": (("--prompt", "x", "more"), ("more",)),
}


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_bad_request(llama_bundle: TinyBundle, kind: str, form: str) -> None:
    options, names = REQUESTS[kind]
    as_json = ["--json"] if form == "json" else []
    done = call("generate", llama_bundle.folder, *as_json, *options)
    done.refused(*names)
    assert done.stdout == ""


@pytest.mark.parametrize("kind", ["prompt too long", "option unknown", "temperature"])
def test_bad_request_in_a_process_of_its_own(llama_bundle: TinyBundle, kind: str) -> None:
    options, names = REQUESTS[kind]
    spawn("generate", llama_bundle.folder, *options).refused(*names)


def test_prompt_that_is_no_text(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xff")
    for path, fault in ((tmp_path / "prompt", "not UTF-8 text"), (tmp_path, "Is a directory")):
        call("generate", llama_bundle.folder, "--prompt-file", path).refused(path.name, fault)
    call("generate", llama_bundle.folder, "--prompt", "a\udcff").refused("Unicode", "character 1")


@pytest.mark.parametrize(
    ("encoding", "name"), [("utf-8:strict", "not UTF-8"), ("utf-8:surrogateescape", "Unicode")]
)
def test_no_bytes_of_another_encoding_in_a_chat(
    llama_bundle: TinyBundle, encoding: str, name: str
) -> None:
    done = subprocess.run(
        command_line("chat", llama_bundle.folder),
        input=b"\xff\xff\n",
        env=environment(PYTHONIOENCODING=encoding),
        capture_output=True,
        check=False,
    )
    Done(done.returncode, done.stdout.decode(), done.stderr.decode()).refused(name)


def test_chat_outgrows_the_context(llama_bundle: TinyBundle) -> None:
    done = spawn("chat", llama_bundle.folder, typed="word " * 200 + "\n")
    done.refused("prompt", "at most 95")


def test_bundle_without_a_template(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    (bundle / "chat_template.jinja").unlink()
    seal(bundle)
    call("generate", bundle, "--prompt", "x").refused("chat_template.jinja", "--raw")
    options = ("--prompt", "x", "--max-new-tokens", "2", "--json")
    call("generate", bundle, *options, "--raw").went_well()


def test_bundle_without_a_drafter(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    bundle = copy_folder(llama_bundle.folder, tmp_path / "bundle")
    graphs = [graph for graph in read_manifest(bundle).graphs if graph.role == "target"]
    for path in (bundle / "graphs").glob("drafter.*"):
        path.unlink()
    seal(bundle, drafter=None, graphs=tuple(graphs))
    options = ("--prompt", "x", "--max-new-tokens", "2", "--json")
    call("generate", bundle, *options, "--draft", "bundle").refused("no drafter", "lookup")
    call("generate", bundle, *options, "--draft", "auto").went_well()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("frob",), "'frob'"),
        (("--frob",), "--frob"),
        (("generate",), "'BUNDLE'"),
        (("verify", "x", "y"), "y"),
    ],
)
def test_bad_command(arguments: tuple[str, ...], name: str) -> None:
    call(*arguments).refused(name)


EXPORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "precision": (("--precision", "fp8"), ("--precision fp8", "fp32")),
    "platform": (("--platform", "toaster"), ("--platform toaster", "generic")),
    "engine": (("--engine", "frob"), ("'frob'", "auto, onnxruntime, standard, none")),
    "context too long": (("--max-context", "257"), ("--max-context 257", "2..256")),
    "context too short": (("--max-context", "1"), ("--max-context 1", "2..256")),
    "no nodes": (("--nodes", "0"), ("--nodes 0", "1..256")),
    "no batch": (("--batch", "0"), ("--batch 0", "1..64")),
    "no number": (("--nodes", "many"), ("'many'",)),
    "option unknown": (("--frob",), ("--frob",)),
    "drafter nowhere": (("--drafter", "nowhere"), ("nowhere", "config.json")),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_bad_export_option(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    options, names = EXPORTS[kind]
    output = tmp_path / "bundle"
    for dry in ((), ("--dry-run",)):
        done = export(llama_bundle.target_folder, "--output", output, *SIZES, *options, *dry)
        done.refused(*names)
        assert not leftovers(output)


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    long = "x" * 300
    call("inspect", long).refused(long, "too long")
    call("generate", long, "--prompt", "x").refused(long)
    export(long, "--output", tmp_path / "bundle").refused(long, "too long")


def test_the_home_of_nobody(tmp_path: Path) -> None:
    export("~nobody-here/x", "--output", tmp_path / "bundle").refused(
        "~nobody-here/x", "no such user"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [("--help",), ("doctor",), ("generate", "--json")])
def test_an_output_that_takes_nothing(llama_bundle: TinyBundle, arguments: tuple[str, ...]) -> None:
    generates = arguments[0] == "generate"
    more = (llama_bundle.folder, "--prompt", "x", "--max-new-tokens", "2") if generates else ()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command_line(*arguments, *more),
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    Done(done.returncode, "", done.stderr).refused("No space left")


def test_no_output(llama_bundle: TinyBundle) -> None:
    export(llama_bundle.target_folder).refused("--output")
    spawn(llama_bundle.target_folder, program="pspec-export").refused("--output")
    export().refused("'TARGET'")


# --- the place of the output ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_output_in_use(llama_bundle: TinyBundle, tmp_path: Path, kind: str) -> None:
    output = tmp_path / "bundle"
    if kind == "folder":
        output.mkdir()
    elif kind == "file":
        output.write_text("mine")
    else:
        output.symlink_to("nowhere")
    for dry in ((), ("--dry-run",)):
        done = export(llama_bundle.target_folder, "--output", output, *SIZES, *dry)
        done.refused(str(output), "in use", "--force" if kind == "folder" else "no bundle")
    assert leftovers(output) == ["bundle"]
    assert kind != "file" or output.read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "file", "link", "dangling link"])
def test_force_replaces_no_work_of_others(
    llama_bundle: TinyBundle, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "bundle"
    make_files(tmp_path / "mine", {"thesis/chapter.md": b"mine", "graphs/plot.svg": b"mine"})
    if kind == "folder":
        (tmp_path / "mine").rename(output)
    elif kind == "file":
        output.write_text("mine")
    else:
        output.symlink_to("mine" if kind == "link" else "nowhere")
    before = contents(tmp_path)
    for dry in ((), ("--dry-run",)):
        done = export(llama_bundle.target_folder, "--output", output, *SIZES, "--force", *dry)
        done.refused(str(output), "no bundle", "choose another --output")
    assert contents(tmp_path) == before
    assert leftovers(output) == ["bundle"]


@pytest.mark.usefixtures("traced_once")
def test_what_appears_during_an_export_is_not_replaced(
    llama_bundle: TinyBundle, tmp_path: Path
) -> None:
    output = tmp_path / "bundle"

    class Appears(Watcher):
        def stage(self, name: str, detail: str) -> None:
            if name == "publish":
                make_files(output, {"mine": b"mine"})

    with pytest.raises(PspecError, match="in use"):
        export_bundle(export_request(llama_bundle, output), Appears())

    assert contents(tmp_path) == {"bundle/mine": b"mine"}


def test_output_below_a_file(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / "deep" / "bundle"
    export(llama_bundle.target_folder, "--output", output, *SIZES).refused("file is not a folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_output_that_cannot_be_made(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    place = Path("/proc/pspec/bundle")
    export(llama_bundle.target_folder, "--output", place, *SIZES).refused(
        f"cannot write to {place}"
    )
    long = tmp_path / "parent" / ("x" * 300)
    export(llama_bundle.target_folder, "--output", long, *SIZES).refused("cannot write to", "long")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_not_writable(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = export(llama_bundle.target_folder, "--output", tmp_path / "bundle", *SIZES)
    tmp_path.chmod(0o700)
    done.refused("cannot write", "permission denied")


def test_output_not_writable_for_root(
    llama_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    done = export(llama_bundle.target_folder, "--output", tmp_path / "bundle", *SIZES)
    done.refused(f"cannot write to {tmp_path / 'bundle'}", "permission denied")


@pytest.mark.parametrize("place", ["target", "drafter", "."])
def test_output_in_the_place_of_its_input(
    llama_bundle: TinyBundle, tmp_path: Path, place: str
) -> None:
    target = copy_folder(llama_bundle.target_folder, tmp_path / "in" / "target")
    drafter = copy_folder(llama_bundle.drafter_folder, tmp_path / "in" / "drafter")
    before = contents(tmp_path)
    output = tmp_path / "in" / place
    done = export(target, "--drafter", drafter, "--output", output, *SIZES, "--force")
    done.refused(f"--output {output}", "would replace")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", [".", "..", "/"])
def test_output_in_the_place_of_the_current_folder(
    llama_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = export(llama_bundle.target_folder, "--output", place, *SIZES, "--force")
    done.refused(f"--output {place} would replace")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


# --- an export that fails half-way ----------------------------------------------------------------


@pytest.fixture(scope="module")
def traces() -> dict[str, dict[str, TracedStage]]:
    """What was traced so far; tracing is nearly all the time of a tiny export."""
    return {}


@pytest.fixture
def traced_once(traces: dict[str, dict[str, TracedStage]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace each model once a module: every test here exports the same two."""

    def trace(model: GraphModel) -> dict[str, TracedStage]:
        name = type(model).__name__
        if name not in traces:
            traces[name] = trace_stages(model)
        return traces[name]

    monkeypatch.setattr(pipeline, "trace_stages", trace)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file may grow past ``size`` bytes: the kernel refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def export_arguments(bundle: TinyBundle, output: Path) -> list[str | Path]:
    """An export of the fixture's target and drafter."""
    drafter = ("--drafter", bundle.drafter_folder)
    return [bundle.target_folder, *drafter, "--output", output, *SIZES]


def export_request(bundle: TinyBundle, output: Path, **options: Any) -> ExportRequest:
    """The same, called from Python."""
    target, drafter = str(bundle.target_folder), bundle.drafter_folder
    return ExportRequest(target, output, drafter, max_context=96, nodes=8, **options)


def test_a_file_size_limit_in_a_process_of_its_own(
    llama_bundle: TinyBundle, tmp_path: Path
) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    output = tmp_path / "new" / "bundle"
    done = spawn(*export_arguments(llama_bundle, output), program="pspec-export", before=limit)

    done.refused(f"cannot write to {output}", "size limit")
    assert not list(tmp_path.iterdir())


class LimitedFrom(Watcher):
    """Lowers the largest file size when a stage begins."""

    def __init__(self, stage: str) -> None:
        self.wanted = stage

    def stage(self, name: str, detail: str) -> None:
        if name == self.wanted:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("stage", ["weights", "graphs", "text", "publish"])
def test_a_file_size_limit_from_a_stage_on(
    llama_bundle: TinyBundle, tmp_path: Path, stage: str
) -> None:
    old = {"old/file": b"old", "manifest.json": b"{}"}
    make_files(tmp_path / "bundle", old)
    request = export_request(llama_bundle, tmp_path / "bundle", force=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    try:
        with pytest.raises(PspecError, match=r"cannot write to .*size limit"):
            export_bundle(request, LimitedFrom(stage))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert leftovers(tmp_path / "bundle") == ["bundle"]
    assert contents(tmp_path / "bundle") == old


def make_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class FullDisk:
    """Opens files whose writes fail once ``left`` of them were done."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.writes = 0
        self._open = io.open

    def open(self, file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not set(mode) & set("wax"):
            return self._open(file, mode, *rest, **named)
        raw = io.BufferedWriter(_Raw(file, self))
        return raw if "b" in mode else io.TextIOWrapper(raw, "utf-8")

    def write(self) -> None:
        self.writes += 1
        if self.writes > self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Raw(io.FileIO):
    def __init__(self, file: Any, disk: FullDisk) -> None:
        super().__init__(file, "w")
        self._disk = disk

    def write(self, data: Any) -> int:
        self._disk.write()
        return super().write(data)


def fill_disk(monkeypatch: pytest.MonkeyPatch, left: int) -> FullDisk:
    """Let only ``left`` more writes succeed in this process."""
    disk = FullDisk(left)
    monkeypatch.setattr(builtins, "open", disk.open)
    monkeypatch.setattr(Path, "open", lambda path, *rest, **named: disk.open(path, *rest, **named))
    return disk


@pytest.mark.usefixtures("traced_once")
def test_a_full_disk_at_any_write(
    llama_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "parent" / "bundle"
    with monkeypatch.context() as patch:
        disk = fill_disk(patch, left=1 << 30)
        export(*export_arguments(llama_bundle, output), "--force").went_well()
    assert contents(output) == contents(llama_bundle.folder)
    assert disk.writes > 15
    old = contents(tmp_path)

    for left in sorted(
        {0, 1, disk.writes // 3, disk.writes // 2, disk.writes - 2, disk.writes - 1}
    ):
        with monkeypatch.context() as patch:
            fill_disk(patch, left)
            done = export(*export_arguments(llama_bundle, output), "--force")
        done.refused(f"cannot write to {output}", "the disk is full", "nothing was left behind")
        assert contents(tmp_path) == old
        assert leftovers(output) == ["bundle"]


@pytest.mark.usefixtures("traced_once")
def test_a_full_disk_leaves_no_parent_folder(
    llama_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, left=3)
    output = tmp_path / "a" / "b" / "bundle"
    export(*export_arguments(llama_bundle, output)).refused("the disk is full")
    assert not list(tmp_path.iterdir())


def perturb_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sigmoid of one static graph becomes a tanh."""

    def assemble_wrongly(*arguments: Any) -> ir.Model:
        model = assemble_graph(*arguments)
        if arguments[3].get("nodes") == 8:
            node = next(node for node in model.graph if node.op_type == "Sigmoid")
            node.op_type = "Tanh"
        return model

    monkeypatch.setattr(pipeline, "assemble_graph", assemble_wrongly)


def perturb_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of one tensor is off by a tenth."""

    def write_wrongly(tensors: Any, *rest: Any) -> Any:
        changed = {name: tensor.clone() for name, tensor in tensors}
        changed["layers.0.input_layernorm.weight"][3] += 0.1
        return write_weights(sorted(changed.items()), *rest)

    monkeypatch.setattr(pipeline, "write_weights", write_wrongly)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("perturb", "name"), [(perturb_graph, "target.n8.s96.onnx"), (perturb_weights, "target.")]
)
def test_a_graph_that_computes_something_else_is_not_published(
    llama_bundle: TinyBundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    perturb: Callable[[pytest.MonkeyPatch], None],
    name: str,
) -> None:
    perturb(monkeypatch)
    output = tmp_path / "bundle"
    export(*export_arguments(llama_bundle, output)).refused("parity failed", name, "differs")
    assert not leftovers(output)


# --- interrupted, resumed, repeated ---------------------------------------------------------------


class InterruptedAt(Watcher):
    """Presses Ctrl-C when a stage begins; remembers what it was told."""

    def __init__(self, stage: str | None) -> None:
        self.wanted = stage
        self.stages: list[str] = []
        self.notes: list[str] = []

    def stage(self, name: str, detail: str) -> None:
        if name == self.wanted:
            raise KeyboardInterrupt
        self.stages.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.usefixtures("traced_once")
def test_an_interrupted_export_resumes(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    request = export_request(llama_bundle, tmp_path / "bundle")
    done: dict[str, list[str]] = {
        "weights": [],
        "graphs": [],
        "parity": ["weights"],
        "publish": ["weights", "graphs"],
    }
    for stage, finished in done.items():
        watcher = InterruptedAt(stage)
        with pytest.raises(KeyboardInterrupt):
            export_bundle(request, watcher)
        assert leftovers(request.output) == [".bundle.partial"]
        # What a run before finished is not done again, and the run says so.
        assert not set(watcher.stages) & set(finished)
        assert bool(watcher.notes) == bool(finished)
        assert all(name in watcher.notes[0] for name in finished)

    watcher = InterruptedAt(None)
    export_bundle(request, watcher)

    assert watcher.stages == ["load", "text", "publish"]
    assert leftovers(request.output) == ["bundle"]
    assert contents(request.output) == contents(llama_bundle.folder)


@pytest.mark.usefixtures("traced_once")
def test_another_export_does_not_resume(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    first = export_request(llama_bundle, tmp_path / "bundle")
    with pytest.raises(KeyboardInterrupt):
        export_bundle(first, InterruptedAt("graphs"))
    (tmp_path / ".bundle.partial" / "graphs" / "stale.onnx").write_bytes(b"x")

    watcher = InterruptedAt("parity")
    with pytest.raises(KeyboardInterrupt):
        export_bundle(replace_context(first, 48), watcher)

    assert not watcher.notes
    assert watcher.stages[:3] == ["load", "text", "weights"]
    assert not list(tmp_path.rglob("stale.onnx"))


def replace_context(request: ExportRequest, tokens: int) -> ExportRequest:
    """The same export with another context."""
    return ExportRequest(
        request.target, request.output, request.drafter, max_context=tokens, nodes=request.nodes
    )


@pytest.mark.usefixtures("traced_once")
def test_what_a_killed_process_left_is_not_published(
    llama_bundle: TinyBundle, tmp_path: Path
) -> None:
    request = export_request(llama_bundle, tmp_path / "bundle")
    with pytest.raises(KeyboardInterrupt):
        export_bundle(request, InterruptedAt("parity"))
    partial = tmp_path / ".bundle.partial"
    make_files(partial, {".progress.json.1.partial": b"x", "notes": b"x", "reports/old": b"x"})

    export_bundle(request)

    assert contents(request.output) == contents(llama_bundle.folder)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("damage", [Path.unlink, cut_short, lambda path: flip(path, 70_000)])
def test_damaged_weights_are_not_resumed(
    llama_bundle: TinyBundle, tmp_path: Path, damage: Damage
) -> None:
    request = export_request(llama_bundle, tmp_path / "bundle")
    with pytest.raises(KeyboardInterrupt):
        export_bundle(request, InterruptedAt("publish"))
    damage(tmp_path / ".bundle.partial" / "graphs" / "weights.data")

    watcher = InterruptedAt(None)
    export_bundle(request, watcher)

    assert not watcher.notes
    assert watcher.stages[:3] == ["load", "text", "weights"]
    assert contents(request.output) == contents(llama_bundle.folder)


def test_ctrl_c_keeps_the_partial_folder(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    command = command_line(*export_arguments(llama_bundle, output), program="pspec-export")
    with subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore the signal, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("trace"):
                process.send_signal(signal.SIGINT)
                break
        _, stderr = process.communicate(timeout=120)

    assert (process.returncode, stderr.strip()) == (130, "interrupted")
    assert leftovers(output) == [".bundle.partial"]
    watcher = InterruptedAt("trace")
    with pytest.raises(KeyboardInterrupt):
        export_bundle(export_request(llama_bundle, output), watcher)
    assert watcher.notes == ["resuming: weights already done"]


def test_an_export_repeats_byte_for_byte(llama_bundle: TinyBundle, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    make_files(output, {"manifest.json": b"{}", "graphs/stale.onnx": b"x"})

    arguments = [*export_arguments(llama_bundle, output), "--force"]
    # Traced afresh, in another process with another order of its sets.
    done = spawn(*arguments, program="pspec-export", PYTHONHASHSEED="1")

    assert done.went_well().endswith(f"bundle: {output}\n")
    assert leftovers(output) == ["bundle"]
    first, again = read_manifest(llama_bundle.folder), read_manifest(output)
    assert again.files.keys() == first.files.keys() == contents(output).keys() - {"manifest.json"}
    # Another process may use another number of threads, which parity's last digits depend on.
    exact = [name for name in first.files if not name.startswith("reports/")]
    assert {name: again.files[name] for name in exact} == {
        name: first.files[name] for name in exact
    }
    assert (again.tensors, again.graphs) == (first.tensors, first.graphs)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("kind", ["empty folder", "link to a bundle"])
def test_force_replaces_where_nothing_is_lost(
    llama_bundle: TinyBundle, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "bundle"
    make_files(tmp_path / "mine", {"manifest.json": b"mine"})
    if kind == "empty folder":
        output.mkdir()
    else:
        output.symlink_to("mine")

    export(*export_arguments(llama_bundle, output), "--force").went_well()

    assert contents(output) == contents(llama_bundle.folder)
    assert not output.is_symlink()
    assert leftovers(output) == ["bundle"]
    assert contents(tmp_path / "mine") == {"manifest.json": b"mine"}
