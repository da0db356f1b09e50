"""The ONNX Runtime engine of a bundle: built, rebuilt, refused, and run beside the standard one."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from bundles import TinyBundle, export_once, tiny_bundle
from commands import (
    RUNTIME_ONLY,
    call,
    copy_folder,
    read_manifest,
    seal,
    spawn,
)
from pspec.errors import EngineError, RequestError
from pspec.export import onnxruntime_engine, pipeline
from pspec.export.fuse import fuse_graph
from pspec.files import sha256_file
from pspec.runtime.bundle import open_bundle
from pspec.runtime.engine import Engine
from pspec.runtime.engines import ENGINES, build_engine, choose_engine, is_current, open_engine
from pspec.runtime.fused import read_sidecar
from pspec.runtime.generate import DraftMode, GenerationConfig, Generator
from tiny import make_hf
from traces import trace_stages_once

CONTEXT = 96
MODES: tuple[DraftMode, ...] = ("off", "bundle", "lookup")
ASK = ("--prompt", "one two one two", "--raw", "--max-new-tokens", "12", "--json")


@pytest.fixture(scope="module")
def plain(llama_bundle: TinyBundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of fp32 with heads of 24 and an engine."""
    folder = tmp_path_factory.mktemp("plain") / "bundle"
    shutil.copytree(llama_bundle.folder, folder, ignore=shutil.ignore_patterns("engines"))
    build_engine(open_bundle(folder))
    return folder


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of int8 with heads of 16, which the engine rotates, and an engine."""
    folder = tmp_path_factory.mktemp("rounded")
    bundle = tiny_bundle(folder, precision="int8", min_agreement=0, head_dim=16).folder
    build_engine(open_bundle(bundle))
    return bundle


@pytest.fixture
def bare(plain: Path, tmp_path: Path) -> Path:
    """The bundle without an engine."""
    folder = tmp_path / "bundle"
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("engines"))
    return folder


def engine_of(bundle: Path) -> Path:
    return bundle / "engines" / "onnxruntime"


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, the engine's included."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def token_ids(done_stdout: str) -> list[int]:
    found: list[int] = json.loads(done_stdout)["token_ids"]
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


# What is built


@pytest.mark.parametrize("kind", ["plain", "rounded"])
def test_the_sidecar_says_what_was_built(kind: str, request: pytest.FixtureRequest) -> None:
    bundle = open_bundle(request.getfixturevalue(kind))
    folder, manifest = engine_of(bundle.folder), bundle.manifest

    sidecar = read_sidecar(bundle)

    assert sidecar.source == manifest.checksum
    files = {path.name for path in folder.iterdir()}
    assert files == {"engine.json", "target.onnx", "drafter.onnx", "weights.data"}
    assert sidecar.files.keys() == files - {"engine.json"}
    for name, entry in sidecar.files.items():
        assert entry.bytes == (folder / name).stat().st_size
        assert entry.sha256 == sha256_file(folder / name)
    # Each shape of the plan was checked with either filling, and text.
    static = [graph.file for graph in manifest.graphs if graph.sizes]
    assert sorted(row.inputs for row in sidecar.parity) == sorted(["text", *static, *static])
    for row in sidecar.parity:
        assert row.error < 1e-3 or row.inputs == "text"
        assert row.agree > 0.9
    text = next(row for row in sidecar.parity if row.inputs == "text")
    assert (text.error > 1e-4) == (kind == "rounded")
    for role in ("target", "drafter"):
        specs = sidecar.graphs[role].outputs
        assert not [spec.name for spec in specs if spec.name.startswith("new_")]


def test_weights_are_stored_once(plain: Path, rounded: Path) -> None:
    """The engine's own file holds what was re-packed; the rest stays in the bundle's."""
    assert (engine_of(plain) / "weights.data").stat().st_size < 4096
    own = (engine_of(rounded) / "weights.data").stat().st_size
    stored = [t for t in read_manifest(rounded).tensors if t.name.endswith(".quantised")]
    packed = sum(tensor.bytes for tensor in stored)
    assert packed <= own < 1.6 * packed
    for bundle in (plain, rounded):
        for role in ("target", "drafter"):
            path = engine_of(bundle) / f"{role}.onnx"
            graph = onnx.load(path, load_external_data=False).graph
            places = {
                entry.value
                for tensor in graph.initializer
                for entry in tensor.external_data
                if entry.key == "location"
            }
            assert "graphs/weights.data" in places
            assert places <= {"graphs/weights.data", "engines/onnxruntime/weights.data"}
            assert path.stat().st_size < 60_000
            assert str(bundle).encode() not in path.read_bytes()


def test_building_leaves_the_bundle_alone_and_repeats(plain: Path, bare: Path) -> None:
    before = everything(bare)

    build_engine(open_bundle(bare))

    after = everything(bare)
    assert {name: after.pop(name) for name in before} == before
    assert {name.rpartition("/")[0] for name in after} == {"engines/onnxruntime"}
    again = everything(plain)
    for name in after.keys() - {"engines/onnxruntime/engine.json"}:  # parity has a last digit
        assert after[name] == again[name], name
    assert call("verify", bare).went_well().endswith("ok\n")


def test_build_needs_no_torch(bare: Path) -> None:
    without = set(RUNTIME_ONLY) - {"onnx", "onnx_ir", "onnxscript"}

    spawn("build", bare, without=without).went_well()

    assert is_current(open_bundle(bare))


def test_an_engine_moves_with_its_bundle(plain: Path, tmp_path: Path) -> None:
    moved = copy_folder(plain, tmp_path / "elsewhere")

    done = spawn("generate", moved, *ASK, without=RUNTIME_ONLY)

    assert token_ids(done.went_well()) == token_ids(call("generate", plain, *ASK).went_well())


# Commands


def test_build_builds_and_stale_skips(bare: Path) -> None:
    done = call("build", bare, "--stale")
    assert (done.status, done.stdout.splitlines()[-1]) == (0, f"engine: {engine_of(bare)}")
    built = (engine_of(bare) / "engine.json").stat().st_ino

    done = call("build", bare, "--stale")

    assert done.went_well() == f"{bare}: engine onnxruntime is current\n"
    assert (engine_of(bare) / "engine.json").stat().st_ino == built
    assert call("build", bare, "--engine", "onnxruntime").status == 0
    assert (engine_of(bare) / "engine.json").stat().st_ino != built


def test_engines_that_cannot_be_built_are_refused(plain: Path, tmp_path: Path) -> None:
    call("build", plain, "--engine", "standard").refused("standard", "needs no building")
    call("build", plain, "--engine", "warp").refused("'warp'", "onnxruntime", "standard")
    call("build", tmp_path).refused(str(tmp_path), "no bundle")


@pytest.mark.parametrize("engine", ["auto", "none", "standard"])
def test_export_ends_with_the_engine_it_is_asked_for(
    engine: str, llama_bundle: TinyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "trace_stages", trace_stages_once)
    sizes = ("--max-context", "96", "--nodes", "8")

    options = ("--drafter", llama_bundle.drafter_folder, "--engine", engine, *sizes)
    target, output = llama_bundle.target_folder, tmp_path / "b"
    done = call(target, "-o", output, *options, program="pspec-export")

    assert done.status == 0
    assert engine_of(output).exists() == (engine == "auto")
    assert (output / "engines").exists() == (engine == "auto")


# Found, made, and refused


@pytest.mark.parametrize("engine", ["auto", "onnxruntime"])
def test_the_engine_is_built_on_first_use(engine: str, bare: Path) -> None:
    first = call("generate", bare, *ASK, "--engine", engine)
    built = (engine_of(bare) / "engine.json").stat()
    second = call("generate", bare, *ASK, "--engine", engine)

    assert (engine_of(bare) / "engine.json").stat().st_mtime_ns == built.st_mtime_ns
    assert token_ids(first.stdout) == token_ids(second.went_well())
    assert json.loads(second.stdout)["stats"]["engine"] == "onnxruntime"


def test_the_standard_engine_builds_nothing(bare: Path) -> None:
    done = spawn("generate", bare, *ASK, "--engine", "standard", without=RUNTIME_ONLY)

    assert json.loads(done.went_well())["stats"]["engine"] == "standard"
    assert not (bare / "engines").exists()


@pytest.mark.parametrize("missing", ["onnx_ir", "onnxscript", "onnx"])
def test_where_nothing_can_be_built_one_line_says_so(missing: str, bare: Path) -> None:
    without = RUNTIME_ONLY if missing == "onnx" else (missing,)

    done = spawn("generate", bare, *ASK, without=without)

    done.refused(str(bare), "no engine", "'pspec-toolkit[build]'", "--engine standard")
    assert not (bare / "engines").exists()


def test_an_engine_runs_where_nothing_can_be_built(plain: Path) -> None:
    done = spawn("generate", plain, *ASK, without=RUNTIME_ONLY)

    assert json.loads(done.went_well())["stats"]["engine"] == "onnxruntime"


def edit(**fields: Any) -> Callable[[Path], object]:
    def change(engine: Path) -> None:
        path = engine / "engine.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def drop_key(engine: Path) -> None:
    sidecar = json.loads((engine / "engine.json").read_text())
    del sidecar["source"]
    (engine / "engine.json").write_text(json.dumps(sidecar))


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda engine: (engine / name).write_bytes((engine / name).read_bytes()[:size])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another bundle": (edit(source="0" * 64), "another bundle"),
    "of another format": (edit(format=99), "format 99"),
    "an unknown key": (edit(colour="red"), "colour"),
    "a key of another type": (edit(format="1"), "format"),
    "a key gone": (drop_key, "source"),
    "no sidecar": (lambda engine: (engine / "engine.json").unlink(), "no engine is built"),
    "an empty sidecar": (cut("engine.json", 0), "engine.json"),
    "half a sidecar": (cut("engine.json", 300), "engine.json"),
    "bytes that are no text": (
        lambda engine: (engine / "engine.json").write_bytes(b"\xff\xfe{}"),
        "engine.json",
    ),
    "half a graph": (cut("target.onnx", 500), "target.onnx has 500 bytes"),
    "no drafter": (lambda engine: (engine / "drafter.onnx").unlink(), "drafter.onnx is missing"),
    "no weights": (lambda engine: (engine / "weights.data").unlink(), "weights.data is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_engine_is_refused_with_what_mends_it(
    damage: str, plain: Path, tmp_path: Path
) -> None:
    bundle = copy_folder(plain, tmp_path / "bundle")
    change, name = DAMAGES[damage]
    change(engine_of(bundle))

    done = call("generate", bundle, *ASK)

    done.refused(name, f"pspec build {bundle} --engine onnxruntime")
    assert not is_current(open_bundle(bundle))
    with pytest.raises(EngineError, match=re.escape(name)):
        open_engine(open_bundle(bundle), "target", "auto", None)


def test_the_command_that_is_named_mends_it(plain: Path, tmp_path: Path) -> None:
    bundle = copy_folder(plain, tmp_path / "bundle")
    edit(format=99)(engine_of(bundle))
    command = re.search(r"pspec (build \S+ --engine \S+)", call("generate", bundle, *ASK).stderr)
    assert command

    assert call(*command[1].split(), "--stale").status == 0

    assert call("generate", bundle, *ASK).went_well()


def test_a_bundle_exported_anew_refuses_the_old_engine(plain: Path, tmp_path: Path) -> None:
    bundle = copy_folder(plain, tmp_path / "bundle")
    seal(bundle, name="another")
    copy_folder(engine_of(plain), engine_of(bundle))

    call("generate", bundle, *ASK).refused("was built from another bundle", "pspec build")


# A build that fails


def wrong_activation(model: ir.Model, slots: int) -> ir.Model:
    fused = FUSE(model, slots)
    node = next(node for node in fused.graph if node.op_type == "QuickGelu")
    node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.2)
    return fused


def wrong_scale(model: ir.Model, slots: int) -> ir.Model:
    fused = FUSE(model, slots)
    node = next(node for node in fused.graph if node.op_type == "GroupQueryAttention")
    node.attributes["scale"] = ir.AttrFloat32("scale", 0.9 * node.attributes["scale"].as_float())
    return fused


def no_such_operator(model: ir.Model, slots: int) -> ir.Model:
    fused = FUSE(model, slots)
    next(node for node in fused.graph if node.op_type == "QuickGelu").op_type = "QuickestGelu"
    return fused


FUSE = fuse_graph


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (wrong_activation, r"target\.n1\.s96\.onnx: \w+ differs"),
        (wrong_scale, r"target\.n1\.s96\.onnx: \w+ differs"),
        (no_such_operator, "QuickestGelu"),
    ],
)
def test_an_engine_that_computes_something_else_is_not_kept(
    fault: Any,
    reason: str,
    with_old: bool,
    plain: Path,
    bare: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if with_old:
        shutil.copytree(engine_of(plain), engine_of(bare))
    before = everything(bare)
    monkeypatch.setattr(onnxruntime_engine, "fuse_graph", fault)

    with pytest.raises(EngineError, match=reason) as caught:
        build_engine(open_bundle(bare))

    assert "\n" not in str(caught.value)
    assert everything(bare) == before
    assert not list((bare / "engines").glob(".*"))


def test_rounding_that_leaves_too_few_tokens_is_refused(
    rounded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copy_folder(rounded, tmp_path / "bundle")
    shutil.rmtree(bundle / "engines")
    monkeypatch.setattr(onnxruntime_engine, "LEAST_AGREEMENT", 1.01)

    call("build", bundle).refused("rounded inputs leave", "of tokens", "--engine standard")


# Heads that no fused attention takes


def test_odd_heads_run_on_the_standard_engine(tmp_path: Path) -> None:
    _, target = make_hf("llama", tmp_path / "target", head_dim=10)
    bundle = export_once(target, tmp_path / "bundle", max_context=CONTEXT, nodes=8)

    name, why = choose_engine("auto", open_bundle(bundle))
    done = call("generate", bundle, *ASK)

    assert (name, why) == ("standard", "heads of 10 channels have no fused form")
    assert json.loads(done.went_well())["stats"]["engine"] == "standard"
    call("build", bundle).refused("standard", "heads of 10")
    call("generate", bundle, *ASK, "--engine", "onnxruntime").refused(
        "heads of 10 channels", "multiples of 8", "--engine standard"
    )
    assert not engine_of(bundle).exists()


# Running


def tree_rows(engine: Engine, tokens: list[int], parents: list[int], wanted: int) -> dict[str, Any]:
    """Run a tree behind the cache as it stands; returns the outputs of its first nodes."""
    size = engine.fit(len(tokens))
    binding = engine.bind(size, size)
    inputs, base = binding.inputs, int(engine.lengths[0])
    depths = [0] * len(tokens)
    inputs["tree_mask"][:] = False
    for node, parent in enumerate(parents):
        inputs["tree_mask"][0, node, node] = True
        if parent >= 0:
            depths[node] = depths[parent] + 1
            inputs["tree_mask"][0, node] |= inputs["tree_mask"][0, parent]
    for node in range(len(tokens), size):
        inputs["tree_mask"][0, node, node] = True
    inputs["token_ids"][0] = 0
    inputs["token_ids"][0, : len(tokens)] = tokens
    inputs["position_ids"][0] = base
    inputs["position_ids"][0, : len(tokens)] += np.array(depths, np.int32)
    inputs["logit_rows"][0] = np.arange(size)
    engine.run(binding, wanted)
    return {name: array[0, : len(tokens)].copy() for name, array in binding.outputs.items()}


def chain(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    outputs = tree_rows(engine, tokens, list(range(-1, len(tokens) - 1)), len(tokens))
    engine.commit(0, range(len(tokens)))
    return outputs


PATHS = [[0, 3, 5, 7], [0, 2], [0, 1, 4], [0], [0, 3, 6]]
PARENTS = [-1, 0, 0, 0, 1, 3, 3, 5]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_an_accepted_path_of_any_branch_leaves_a_chain(
    path: list[int], name: str, plain: Path
) -> None:
    bundle = open_bundle(plain)
    start, tree = prompt(9), prompt(8, seed=1)
    branched, straight = (open_engine(bundle, "target", engine, 1) for engine in (name, "standard"))

    chain(branched, start)
    outputs = tree_rows(branched, tree, PARENTS, 4)
    branched.commit(0, path)
    chain(straight, start)
    wanted = chain(straight, [tree[node] for node in path])

    assert branched.lengths.tolist() == straight.lengths.tolist() == [9 + len(path)]
    np.testing.assert_allclose(branched.cache_rows(0), straight.cache_rows(0), atol=1e-5)
    np.testing.assert_allclose(outputs["logits"][path], wanted["logits"], atol=1e-4)
    # And what comes next sees the path alone.
    following = prompt(3, seed=2)
    np.testing.assert_allclose(
        chain(branched, following)["logits"], chain(straight, following)["logits"], atol=1e-4
    )


@pytest.mark.parametrize("name", ENGINES)
def test_truncated_rows_are_forgotten(name: str, plain: Path) -> None:
    engine = open_engine(open_bundle(plain), "target", name, 1)
    first = chain(engine, prompt(8))
    again = prompt(5, seed=3)
    for tokens in (prompt(8, seed=4), prompt(8, seed=5)):
        chain(engine, tokens)

    engine.truncate(0, 8)
    engine.truncate(0, 20)  # longer than it is: nothing happens
    assert engine.lengths.tolist() == [8]
    short = chain(engine, again)
    engine.truncate(0, 0)
    np.testing.assert_allclose(chain(engine, prompt(8))["logits"], first["logits"], atol=1e-5)
    np.testing.assert_allclose(chain(engine, again)["logits"], short["logits"], atol=1e-5)


@pytest.mark.parametrize("name", ENGINES)
def test_the_context_ends_with_one_line(name: str, plain: Path) -> None:
    engine = open_engine(open_bundle(plain), "target", name, 1)
    for start in range(0, CONTEXT, 8):
        chain(engine, prompt(8, seed=start))

    assert engine.lengths.tolist() == [CONTEXT]
    with pytest.raises(RequestError, match="97 cache rows do not fit the context of 96"):
        chain(engine, [5])


def answers(bundle: Path, engine: str, ids: list[int], count: int) -> list[list[int]]:
    generator = Generator(open_bundle(bundle), engine=engine, threads=1)
    return [
        generator.generate(
            ids, GenerationConfig(max_new_tokens=count, eos_token_id=(), draft=mode)
        ).token_ids
        for mode in MODES
    ]


@pytest.mark.parametrize("length", [1, 20, 63, 64, 65, 90, 95])
def test_every_row_of_the_context_can_be_used(length: int, plain: Path, rounded: Path) -> None:
    """Padded calls and trees that reach past the end included."""
    ids = prompt(length)

    want, *drafted = answers(plain, "standard", ids, CONTEXT - length)
    assert len(want) == CONTEXT - length
    assert drafted == [want, want]
    assert answers(plain, "onnxruntime", ids, CONTEXT - length) == [want, want, want]
    plainly, *drafted = answers(rounded, "onnxruntime", ids, CONTEXT - length)
    assert len(plainly) == CONTEXT - length
    assert drafted == [plainly, plainly]


def test_rounded_inputs_stay_close_to_the_standard_engine(rounded: Path) -> None:
    """Teacher-forced: a band, since rounding inputs is not exact."""
    bundle = open_bundle(rounded)
    fused, standard = (open_engine(bundle, "target", name, 1) for name in ENGINES)
    agree: list[NDArray[Any]] = []
    for seed in range(CONTEXT // 8):
        tokens = prompt(8, seed)
        have, want = chain(fused, tokens), chain(standard, tokens)
        spread = float(np.std(want["logits"]))
        apart = float(np.std(have["logits"] - want["logits"]))
        assert 1e-4 * spread < apart < 0.2 * spread
        agree.append(have["next_token"] == want["next_token"])
    assert np.mean(agree) > 0.8
