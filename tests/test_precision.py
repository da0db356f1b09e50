"""Bundles of int8 and int4 weights against transformers on the float model.

Most models here are lossless: every linear layer holds plus or minus one number an output row,
which either precision represents exactly. What differs from the float model by more than rounding
is then a fault, not the price of the precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import nn
from transformers import PreTrainedModel

from bundles import export_once, tiny_bundle
from commands import call, contents, export, read_manifest
from pspec.errors import ConfigError, EngineError, PspecError
from pspec.export import pipeline
from pspec.export import precision as precision_module
from pspec.export.assemble import assemble_graph
from pspec.export.lint import check_graph
from pspec.export.weights import write_weights
from pspec.models.checkpoint import load_target
from pspec.models.decoder import Decoder
from pspec.models.self_text import find_opening, write_text
from pspec.progress import Watcher
from pspec.runtime.bundle import open_bundle
from pspec.runtime.generate import DraftMode, GenerationConfig, Generator
from pspec.runtime.ort import open_session
from tiny import VOCAB_SIZE, make_hf

Array = NDArray[Any]
IDS = np.random.default_rng(3).integers(0, VOCAB_SIZE, (1, 40)).astype(np.int32)
PRECISIONS = ("int8", "int4")
FAMILIES: dict[str, dict[str, Any]] = {
    # Square products, in which an axis can be wrong without anything else noticing.
    "llama": {"head_dim": 16},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}
LINEARS = 7 * 2 + 1
SIZES: dict[str, Any] = {"max_context": 96, "nodes": 8}


@dataclass(frozen=True)
class Exported:
    """Bundles of one target by precision, and the float model."""

    hf_model: PreTrainedModel
    target: Path
    bundles: dict[str, Path]


@torch.no_grad()
def make_lossless(family: str, folder: Path, **overrides: Any) -> tuple[PreTrainedModel, Path]:
    """One number an output row, from e^-2 to e^2 times the usual size, under random signs."""
    model, _ = make_hf(family, folder, **overrides)
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            rows = len(module.weight)
            sizes = (
                0.1
                * torch.exp(torch.linspace(-2, 2, rows))[torch.randperm(rows, generator=generator)]
            )
            signs = torch.randn(module.weight.shape, generator=generator).sign()
            module.weight.copy_(signs * sizes[:, None])
    model.save_pretrained(folder)
    return model, folder


def export_all(
    target: Path, folder: Path, precisions: Sequence[str] = ("fp32", *PRECISIONS), **options: Any
) -> dict[str, Path]:
    return {
        name: export_once(target, folder / name, precision=name, **SIZES | options)
        for name in precisions
    }


TEXT_LENGTH = 64
"""Shorter than it is, for speed."""
_WRITTEN: dict[str, torch.Tensor] = {}


@pytest.fixture(autouse=True, scope="module")
def texts_once() -> Iterator[None]:
    """A target writes its text, a short one, once: that is nearly all the time of an export."""

    def write(decoder: Decoder, opening: Sequence[int], **options: Any) -> torch.Tensor:
        options.pop("advance")
        weights = b"".join(tensor.numpy().tobytes() for tensor in decoder.state_dict().values())
        key = f"{sha256(weights).hexdigest()} {decoder.config} {opening} {options}"
        if key not in _WRITTEN:
            _WRITTEN[key] = write_text(decoder, opening, **options)
        return _WRITTEN[key].clone()

    with mock.patch.multiple(precision_module, write_text=write, _LENGTH=TEXT_LENGTH):
        yield


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    found = {}
    for family, overrides in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        model, target = make_lossless(family, folder / "target", **overrides)
        found[family] = Exported(model, target, export_all(target, folder, min_agreement=0.99))
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Weights as they come, which lose something."""
    folder = tmp_path_factory.mktemp("usual")
    model, target = make_hf("llama", folder / "target", **FAMILIES["llama"])
    return Exported(model, target, export_all(target, folder, PRECISIONS, min_agreement=0))


@pytest.fixture(params=FAMILIES)
def exported(lossless: dict[str, Exported], request: pytest.FixtureRequest) -> Exported:
    return lossless[request.param]


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, ids: Array = IDS) -> Array:
    logits: Array = model(torch.from_numpy(ids).long()).logits[0].numpy()
    return logits


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The ids and what transformers says after them."""
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count}
    answer: list[int] = model.generate(torch.tensor([ids]), **options)[0].tolist()
    return answer


def plain_session(path: Path) -> onnxruntime.InferenceSession:
    """Nothing fused: dequantised weights meet inputs that nobody rounds."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def graph_logits(bundle: Path, session: Any = None, ids: Array = IDS) -> Array:
    """Of every token, in one call of the symbolic target graph."""
    cache = read_manifest(bundle).target.cache
    session = session or plain_session(bundle / "graphs" / "target.symbolic.onnx")
    count = ids.shape[1]
    rows = np.arange(count, dtype=np.int32)[None]
    empty = np.zeros((1, cache.heads, 1, cache.size), np.float32)
    parts = [f"past_{part}.{layer}" for part in ("key", "value") for layer in range(cache.layers)]
    feeds = {
        "token_ids": ids,
        "position_ids": rows,
        "tree_mask": np.tri(count, dtype=np.bool_)[None],
        "cache_length": np.zeros(1, np.int32),
        "logit_rows": rows,
    }
    (logits,) = session.run(["logits"], feeds | dict.fromkeys(parts, empty))
    found: Array = logits[0]
    return found


def apart(have: Array, want: Array) -> float:
    """Largest difference, over the larger of 1 and the scale."""
    return float(np.abs(have - want).max() / max(1.0, np.abs(want).max()))


# What is computed


def test_a_lossless_bundle_computes_what_the_float_model_does(
    exported: Exported, precision: str
) -> None:
    wanted = transformers_logits(exported.hf_model)

    logits = graph_logits(exported.bundles[precision])

    assert logits.shape == (40, VOCAB_SIZE)
    assert apart(logits, wanted) < 1e-4
    assert (logits.argmax(-1) == wanted.argmax(-1)).all()
    assert len(set(logits.argmax(-1).tolist())) > 10


def test_the_standard_engine_rounds_no_inputs(exported: Exported, precision: str) -> None:
    """ONNX Runtime itself would round the inputs of int4 products to 8 bits."""
    bundle = exported.bundles[precision]
    path = bundle / "graphs" / "target.symbolic.onnx"
    wanted = transformers_logits(exported.hf_model)

    careful = apart(graph_logits(bundle, open_session(path, 1)), wanted)
    default = apart(graph_logits(bundle, onnxruntime.InferenceSession(path)), wanted)

    assert careful < 1e-4
    assert precision == "int8" or default > 1e-3


def dequantised(bundle: Path) -> dict[str, Array]:
    """The quantised weights of a bundle ``[out, in]``, read by ONNX out of its target graph."""
    path = bundle / "graphs" / "target.symbolic.onnx"
    graph = onnx.load(path).graph
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    found = {}
    for name, integers in tensors.items():
        if name.endswith(".quantised"):
            base = name.removesuffix(".quantised")
            scales = tensors[f"{base}.scale"]
            if scales.ndim == 2:
                scales = np.repeat(scales, len(integers) // len(scales), axis=0)
            found[base] = (integers.astype(np.float32) * scales).T
    return found


def test_the_target_is_the_model_of_its_stored_weights(
    usual: Exported, precision: str, tmp_path: Path
) -> None:
    """Lossy weights: transformers with what the file holds computes the same, token by token."""
    bundle = usual.bundles[precision]
    model, _ = make_hf("llama", tmp_path, **FAMILIES["llama"])
    weights = dequantised(bundle)
    state = {
        name if name.startswith("lm_head") else f"model.{name}": torch.from_numpy(weight.copy())
        for name, weight in weights.items()
    }
    assert len(state) == LINEARS
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [name for name in missing if "proj" in name or "lm_head" in name]

    wanted = transformers_logits(model)
    assert apart(graph_logits(bundle), wanted) < 1e-4
    assert apart(transformers_logits(usual.hf_model), wanted) > 1e-3
    generator = Generator(open_bundle(bundle), engine="standard")
    ids = IDS[0, :9].tolist()
    modes: tuple[DraftMode, ...] = ("off", "lookup")
    for draft in modes:
        config = GenerationConfig(max_new_tokens=30, eos_token_id=(), draft=draft)
        again = generator.generate(ids, config).token_ids
        assert again == greedy(model, ids, 30)[9:]


# What is stored


def test_quantised_bundles_are_a_quarter_and_an_eighth(exported: Exported) -> None:
    sizes = {
        name: (bundle / "graphs" / "weights.data").stat().st_size
        for name, bundle in exported.bundles.items()
    }
    table = VOCAB_SIZE * 64 * 4
    layers = 2 * 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    rest = 40_000  # norms, rotary tables, alignment

    # A tied table is stored twice, as floats for the embedding and in int8 for the head.
    assert sizes["int8"] < (layers + table) * (1 / 4 + 1 / 64) + table + rest
    assert sizes["int4"] < layers * (1 / 8 + 1 / 32) + table * (1 / 4 + 1 / 64) + table + rest
    assert sizes["fp32"] > layers + table
    report = read_report(exported.bundles["int4"])
    assert report["float_bytes"] == layers + table
    assert report["weight_bytes"] < 0.2 * (layers + table)


def graphs(bundle: Path) -> list[onnx.GraphProto]:
    """Every target graph."""
    paths = sorted((bundle / "graphs").glob("target.*.onnx"))
    assert len(paths) == 4
    return [onnx.load(path, load_external_data=False).graph for path in paths]


def test_products_are_quantised_and_lookups_are_not(exported: Exported, precision: str) -> None:
    for graph in graphs(exported.bundles[precision]):
        makers = {name: node for node in graph.node for name in node.output}
        dequantised = {name for name in makers if makers[name].op_type == "DequantizeLinear"}
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        kinds = {name: tensor.data_type for name, tensor in tensors.items()}
        products = [node for node in graph.node if node.op_type == "MatMul"]
        weighed = [makers[node.input[1]] for node in products if node.input[1] in dequantised]
        assert len(weighed) == len(dequantised) == LINEARS
        for node in weighed:
            assert len(node.input) == 2  # no zero point
            stored, scale = (tensors[name] for name in node.input)
            attributes = {a.name: a.i for a in node.attribute}
            head = node.output[0] == "lm_head.weight"
            if precision == "int8" or head:
                assert kinds[stored.name] == TensorProto.INT8
                assert (attributes["axis"], [*scale.dims]) == (1, [stored.dims[1]])
            else:
                assert kinds[stored.name] == TensorProto.INT4
                assert attributes == {"axis": 0, "block_size": 32}
                assert [*scale.dims] == [stored.dims[0] // 32, stored.dims[1]]
        lookups = [node for node in graph.node if node.op_type == "Gather"]
        tables = [node.input[0] for node in lookups if node.input[0] in kinds]
        assert "embed_tokens.weight" in tables
        assert not dequantised & {node.input[0] for node in lookups}
        assert all(kinds[name] == TensorProto.FLOAT for name in tables)
        logits = next(value for value in graph.output if value.name == "logits")
        assert logits.type.tensor_type.shape.dim[2].dim_value == VOCAB_SIZE


def test_a_tied_table_is_stored_as_floats_and_in_int8(lossless: dict[str, Exported]) -> None:
    for name in PRECISIONS:
        tensors = {t.name: t for t in read_manifest(lossless["qwen3"].bundles[name]).tensors}
        assert tensors["embed_tokens.weight"].dtype == "float32"
        assert tensors["embed_tokens.weight"].shape == (VOCAB_SIZE, 64)
        assert tensors["lm_head.weight.quantised"].dtype == "int8"
        assert tensors["lm_head.weight.quantised"].shape == (64, VOCAB_SIZE)
        assert "lm_head.weight" not in tensors


def test_versions_are_the_oldest_that_can_say_it(exported: Exported) -> None:
    for name, opset in (("fp32", 18), ("int8", 18), ("int4", 21)):
        for path in (exported.bundles[name] / "graphs").glob("*.onnx"):
            model = onnx.load(path, load_external_data=False)
            assert [entry.version for entry in model.opset_import] == [opset]
            onnx.checker.check_model(str(path), full_check=True)


def test_verify_passes_a_quantised_bundle(usual: Exported, precision: str) -> None:
    done = call("verify", usual.bundles[precision], "--engine", "standard")

    assert done.went_well().endswith("ok\n")


# What goes wrong is noticed


def change_scales(change: Callable[[Array], Array], name: str = "layers.1.mlp.up_proj") -> Any:
    """What ``write_weights`` would do with other scales for one weight."""

    def write(tensors: Any, *rest: Any) -> Any:
        changed = dict(tensors)
        stored = changed[f"{name}.weight"]
        scales = change(stored.scales.copy())
        changed[f"{name}.weight"] = type(stored)(stored.integers, scales, stored.scheme)
        return write_weights(sorted(changed.items()), *rest)

    return write


def put(value: float) -> Callable[[Array], Array]:
    """One channel's scale replaced."""

    def change(scales: Array) -> Array:
        scales[..., 5] = value
        return scales

    return change


def enlarge(scales: Array) -> Array:
    scales[..., 5] *= 100
    return scales


FAULTS: dict[str, tuple[Callable[[Array], Array], str]] = {
    "a channel of zeros": (put(0.0), "layers.1.mlp.up_proj.*positive and finite"),
    "an outlier": (enlarge, "parity failed"),
    "the scales of the neighbours": (lambda scales: np.roll(scales, 1, axis=-1), "parity failed"),
    "one scale for all": (lambda scales: np.full_like(scales, scales.mean()), "parity failed"),
}


@pytest.mark.parametrize(("fault", "precision"), [*zip(FAULTS, 2 * PRECISIONS, strict=True)])
def test_wrong_scales_are_not_published(
    fault: str,
    precision: str,
    lossless: dict[str, Exported],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change, reason = FAULTS[fault]
    monkeypatch.setattr(pipeline, "write_weights", change_scales(change))
    target = lossless["llama"].target

    with pytest.raises((EngineError, ConfigError), match=reason):
        export_once(target, tmp_path / "b", precision=precision, min_agreement=0, **SIZES)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [0.0, -0.0, -0.1, float("nan"), float("inf")])
def test_the_lint_names_a_scale_no_compiler_takes(
    value: float, exported: Exported, precision: str
) -> None:
    model = ir.load(exported.bundles[precision] / "graphs" / "target.n1.s96.onnx")
    check_graph(model, "whole")
    scale = model.graph.initializers["layers.1.mlp.up_proj.weight.scale"]
    assert scale.const_value is not None
    changed = put(value)(np.array(scale.const_value.numpy()))
    scale.const_value = ir.tensor(changed, name=scale.name)

    with pytest.raises(ConfigError, match=r"graph damaged: layers\.1\.mlp\.up_proj.*positive and"):
        check_graph(model, "damaged")


def test_the_lint_names_a_zero_point(exported: Exported, precision: str) -> None:
    model = ir.load(exported.bundles[precision] / "graphs" / "target.n1.s96.onnx")
    node = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    weight, scale = node.inputs
    assert scale is not None
    assert scale.shape is not None
    zeros = ir.Value(name="zeros", shape=scale.shape, type=ir.TensorType(ir.DataType.INT8))
    zeros.const_value = ir.tensor(np.zeros(scale.shape.numpy(), np.int8), name="zeros")
    model.graph.register_initializer(zeros)
    bad = ir.Node("", "DequantizeLinear", [weight, scale, zeros], name="planted")
    bad.outputs[0].shape = ir.Shape([1])
    bad.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.append(bad)

    with pytest.raises(ConfigError, match="planted: a zero point is not portable"):
        check_graph(model, "damaged")


O_PROJ = "layers.1.self_attn.o_proj.weight"


def wrong_axis(node: ir.Node) -> None:
    assert node.attributes["axis"].as_int() == 1
    node.attributes["axis"] = ir.AttrInt64("axis", 0)


def wrong_block(node: ir.Node) -> None:
    """The scales of half as many blocks that are twice as long."""
    assert node.attributes["block_size"].as_int() == 32
    node.attributes["block_size"] = ir.AttrInt64("block_size", 64)
    scale = node.inputs[1]
    assert scale is not None
    assert scale.const_value is not None
    scale.const_value = ir.tensor(scale.const_value.numpy()[::2].copy(), name=str(scale.name))
    scale.shape = ir.Shape(scale.const_value.shape.numpy())


@pytest.mark.parametrize(("fault", "name"), [(wrong_axis, "int8"), (wrong_block, "int4")])
def test_a_wrong_axis_or_block_is_not_published(
    fault: Callable[[ir.Node], None],
    name: str,
    usual: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a square product of weights whose blocks are not alike."""

    def assemble_wrongly(*arguments: Any) -> ir.Model:
        model = assemble_graph(*arguments)
        (node,) = (each for each in model.graph if each.name == f"{O_PROJ}/dequantise")
        fault(node)
        return model

    monkeypatch.setattr(pipeline, "assemble_graph", assemble_wrongly)

    with pytest.raises(EngineError, match="parity failed"):
        export_once(usual.target, tmp_path / "b", precision=name, min_agreement=0, **SIZES)

    assert not list(tmp_path.iterdir())


def test_a_block_that_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    _, target = make_hf("llama", tmp_path / "target", intermediate_size=80)

    done = export(target, "-o", tmp_path / "b", "--precision", "int4", "--max-context", "96")

    done.refused("layers.0.mlp.down_proj.weight", "80", "32")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


# The gate and the report


def read_report(bundle: Path) -> dict[str, Any]:
    report: dict[str, Any] = msgspec.json.decode((bundle / "reports/precision.json").read_bytes())
    return report


def test_too_little_agreement_is_refused_and_leaves_nothing(
    usual: Exported, tmp_path: Path
) -> None:
    options = ("--precision", "int4", "--max-context", "96", "--min-agreement", "1")

    done = export(usual.target, "-o", tmp_path / "new" / "b", *options)

    worst = [layer["name"] for layer in read_report(usual.bundles["int4"])["layers"][:3]]
    done.refused("int4 agrees with fp32 on", "--min-agreement 100%", *worst)
    assert not list(tmp_path.iterdir())


def test_a_lossless_bundle_agrees_with_itself(exported: Exported, precision: str) -> None:
    report = read_report(exported.bundles[precision])

    assert report["top1"] > 0.998
    assert report["kl"] < 1e-6
    assert report["tokens"] == 8 * TEXT_LENGTH
    assert max(layer["error"] for layer in report["layers"]) < 1e-3


def test_reports_hold_every_layer_once(usual: Exported, precision: str) -> None:
    bundle = usual.bundles[precision]
    report, manifest = read_report(bundle), read_manifest(bundle)

    names = [layer["name"] for layer in report["layers"]]
    stored = {t.name: t.bytes for t in manifest.tensors}
    quantised = [n.removesuffix(".quantised") for n in stored if n.endswith(".quantised")]
    assert sorted(names) == sorted(quantised)
    assert len(set(names)) == len(names) == LINEARS
    for layer in report["layers"]:
        name = layer["name"]
        assert layer["bytes"] == stored[f"{name}.quantised"] + stored[f"{name}.scale"]
    errors = [layer["error"] for layer in report["layers"]]
    assert errors == sorted(errors, reverse=True)
    assert report["weight_bytes"] == sum(layer["bytes"] for layer in report["layers"])
    table = (bundle / "reports/precision.md").read_text()
    picture = (bundle / "reports/precision.svg").read_text()
    for name in names:
        assert table.count(f"| {name} |") == picture.count(f">{name}<") == 1
    assert {f"reports/precision.{end}" for end in ("json", "md", "svg")} <= manifest.files.keys()


def test_errors_of_layers_are_of_the_size_of_their_steps(usual: Exported) -> None:
    """Inputs unknown, a layer's error is about its weights' relative error."""
    for name, (low, high) in {"int8": (0.001, 0.02), "int4": (0.02, 0.2)}.items():
        weights = dequantised(usual.bundles[name])
        float_weights = {
            key.removeprefix("model."): tensor.numpy()
            for key, tensor in usual.hf_model.state_dict().items()
        }
        for layer in read_report(usual.bundles[name])["layers"]:
            key = layer["name"]
            whole = float_weights[key]
            relative = float(np.linalg.norm(weights[key] - whole) / np.linalg.norm(whole))
            if key != "lm_head.weight":
                assert low < layer["error"] < high
            assert 0.1 < layer["error"] / relative < 1.5, key


def test_fp32_has_no_precision_report(lossless: dict[str, Exported]) -> None:
    assert not (lossless["llama"].bundles["fp32"] / "reports" / "precision.json").exists()


@torch.no_grad()
def test_an_outlier_channel_is_handled_or_flagged(tmp_path: Path) -> None:
    """A norm's gain times 1000, its readers' weights divided by it: fp32 is the same model."""
    model, target = make_hf("llama", tmp_path / "target", **FAMILIES["llama"])
    before = transformers_logits(model)
    layer = model.model.layers[1]
    layer.input_layernorm.weight[7] *= 1000
    for part in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, part).weight[:, 7] /= 1000
    model.save_pretrained(target)
    assert apart(transformers_logits(model), before) < 1e-4

    bundle = export_once(target, tmp_path / "b", precision="int8", min_agreement=0, **SIZES)

    report = read_report(bundle)
    worst = {each["name"] for each in report["layers"][:3]}
    assert report["top1"] > 0.9 or all("layers.1.self_attn" in name for name in worst)


# Resuming


class StoppedAt(Watcher):
    """Presses Ctrl-C when a stage begins; remembers the stages."""

    def __init__(self, stage: str | None = None) -> None:
        self.wanted = stage
        self.stages: list[str] = []

    def stage(self, name: str, detail: str) -> None:
        if name == self.wanted:
            raise KeyboardInterrupt
        self.stages.append(name)


def stop(target: Path, output: Path, stage: str, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        export_once(target, output, None, StoppedAt(stage), precision="int4", **SIZES | options)


@pytest.mark.parametrize("stage", ["graphs", "parity", "publish"])
def test_an_interrupted_export_ends_in_the_same_bundle(
    stage: str, usual: Exported, tmp_path: Path
) -> None:
    stop(usual.target, tmp_path / "b", stage, min_agreement=0)

    watcher = StoppedAt()
    export_once(
        usual.target, tmp_path / "b", None, watcher, precision="int4", min_agreement=0, **SIZES
    )

    assert "precision" not in watcher.stages
    assert contents(tmp_path / "b") == contents(usual.bundles["int4"])


def test_a_resumed_export_is_held_to_its_own_agreement(usual: Exported, tmp_path: Path) -> None:
    stop(usual.target, tmp_path / "b", "graphs", min_agreement=0)

    with pytest.raises(PspecError, match="below --min-agreement 100%"):
        export_once(usual.target, tmp_path / "b", precision="int4", min_agreement=1.0, **SIZES)

    assert not list(tmp_path.iterdir())


def test_another_precision_does_not_resume(usual: Exported, tmp_path: Path) -> None:
    stop(usual.target, tmp_path / "b", "graphs", min_agreement=0)

    watcher = StoppedAt("weights")
    with pytest.raises(KeyboardInterrupt):
        export_once(
            usual.target, tmp_path / "b", None, watcher, precision="int8", min_agreement=0, **SIZES
        )

    assert "precision" in watcher.stages


# A drafter


def test_a_drafter_is_quantised_with_its_target(tmp_path: Path) -> None:
    """It drafts worse or better for it; what is said stays the same."""
    bundle = tiny_bundle(tmp_path, precision="int4", min_agreement=0, head_dim=16)

    tensors = {tensor.name: tensor for tensor in read_manifest(bundle.folder).tensors}
    linears = [n for n in tensors if n.startswith("drafter.") and n.endswith(".quantised")]
    assert len(linears) == 7 + 1  # one block and what fuses features
    assert all(tensors[name].dtype == "int4" for name in linears)
    assert not [name for name in tensors if "drafter.lm_head" in name or "drafter.embed" in name]
    generator = Generator(open_bundle(bundle.folder), engine="standard")
    modes: tuple[DraftMode, ...] = ("off", "bundle", "lookup")
    answers = [
        generator.generate(
            IDS[0, :9].tolist(),
            GenerationConfig(max_new_tokens=40, eos_token_id=(), draft=draft),
        )
        for draft in modes
    ]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert answers[1].stats.drafted > 0
    assert call("verify", bundle.folder, "--engine", "standard").went_well().endswith("ok\n")


# The text it is fitted to


def test_an_opening_is_what_all_chats_begin_with() -> None:
    def render(message: str) -> list[int]:
        return [1, 7, 7, *map(ord, message), 2]

    assert find_opening(render, [9]) == [1, 7, 7]
    assert find_opening(lambda message: [*map(ord, message)], [9]) == [9]


@torch.no_grad()
@pytest.mark.parametrize("opening", [[1], [5, 6, 7, 8]])
def test_a_sure_target_writes_its_own_greedy_answer(opening: list[int], tmp_path: Path) -> None:
    """Sampling from a head so sharp that one token has all of the chance."""
    model, target = make_hf("llama", tmp_path, **FAMILIES["llama"])
    model.lm_head.weight.mul_(1000)
    model.save_pretrained(target)

    ids = write_text(load_target(str(target)).decoder, opening, rows=3, length=30, seed=0)

    assert ids.dtype == torch.int32
    assert ids.tolist() == 3 * [greedy(model, opening, 30 - len(opening))]


def test_text_is_sampled_from_a_seed(tmp_path: Path) -> None:
    _, target = make_hf("llama", tmp_path, **FAMILIES["llama"])
    decoder = load_target(str(target)).decoder

    texts = [write_text(decoder, [1], rows=4, length=24, seed=seed) for seed in (0, 0, 1)]

    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert len({tuple(row) for row in texts[0].tolist()}) == 4
