from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from bundles import random_drafter
from plain_drafter import (
    BLOCK_DEFAULTS,
    DEFAULTS,
    Config,
    Tensors,
    complete,
    random_tensors,
    tensor_shapes,
    write_plain,
)
from pspec.errors import CheckpointError, ConfigError, PspecError
from pspec.models.config import BlockConfig, Llama3Scaling, RopeConfig, TargetConfig
from pspec.models.decoder import Decoder
from pspec.models.drafter import Drafter
from pspec.models.drafter_config import DrafterConfig, check_drafter
from pspec.models.drafter_file import (
    check_match,
    drafter_fingerprint,
    read_drafter,
    read_drafter_config,
    write_drafter,
)
from pspec.models.initial import initial_config, initial_drafter
from pspec.models.layers import linear_weights

DOC = Path(__file__).resolve().parents[1] / "docs" / "drafter-format.md"

EAGLE: Config = {"features": "last", "fuse": "concat-fc", "shift": True, "mask_feature": "slot"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FULL: Config = EAGLE | {
    "features": [0, 2],
    "fuse": "dual-norm",
    "fc_bias": True,
    "num_layers": 2,
    "embedding": "own",
    "head": "own",
    "draft_vocab_size": 23,
    "rope": {"theta": 500.0, "scaling": LLAMA3},
    "block": {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True},
}
"""Every tensor there is."""
KINDS: dict[str, Config] = {
    "full": FULL,
    "eagle": EAGLE | {"input_norm": False, "final_norm": False},
    "medusa": {"features": "last", "fuse": "feature-only", "shift": True},
    "pard": {"mask_embedding": "shared", "embedding": "own", "head": "own", "num_layers": 3},
    "pard-2": EAGLE | {"features": [1, 2], "fuse": "scaled-add", "mask_feature": "repeat"},
    "one slot": EAGLE | {"slots": 1},
}


def decode(config: Config) -> DrafterConfig:
    return msgspec.convert(config, DrafterConfig)


def equal(one: Drafter, other: Drafter) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    same = all(torch.equal(mine[name], theirs[name]) for name in mine.keys() & theirs.keys())
    return one.config == other.config and mine.keys() == theirs.keys() and same


# Reading and writing


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_equal(kind: str, tmp_path: Path) -> None:
    drafter = random_drafter(decode(complete(**KINDS[kind])))

    write_drafter(drafter, tmp_path / "drafter")
    again = read_drafter(tmp_path / "drafter")

    assert equal(drafter, again)
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert {tensor.dtype for tensor in again.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_is_what_the_document_says(kind: str, tmp_path: Path) -> None:
    config = complete(**KINDS[kind])
    drafter = random_drafter(decode(config))

    write_drafter(drafter, tmp_path / "drafter")

    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == tensor_shapes(config)
    own, turned = drafter.state_dict(), linear_weights(drafter)
    assert turned <= tensors.keys()
    for name, tensor in tensors.items():
        wanted = own[name].numpy()
        np.testing.assert_array_equal(tensor.T if name in turned else tensor, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_made_without_our_code_is_read(kind: str, tmp_path: Path) -> None:
    config = complete(**KINDS[kind])
    tensors = random_tensors(config)

    drafter = read_drafter(write_plain(tmp_path / "drafter", config, tensors))

    assert drafter.config == decode(config)
    own, turned = drafter.state_dict(), linear_weights(drafter)
    assert own.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(own[name].numpy(), tensor.T if name in turned else tensor)


def test_only_fields_without_a_default_need_to_be_there(tmp_path: Path) -> None:
    full = complete()
    needed = {name: full[name] for name in full.keys() - DEFAULTS.keys()}
    block = {name: full["block"][name] for name in full["block"].keys() - BLOCK_DEFAULTS.keys()}

    folder = write_plain(tmp_path / "drafter", needed | {"block": block}, random_tensors(full))

    assert read_drafter_config(folder) == decode(full)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_widened(dtype: str, tmp_path: Path) -> None:
    drafter = random_drafter(decode(complete(**FULL)))
    kind = getattr(torch, dtype)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.to(kind))
    write_drafter(drafter, tmp_path / "wide")
    narrow = Drafter(drafter.config).to(kind)
    narrow.load_state_dict(drafter.state_dict())

    write_drafter(narrow, tmp_path / "narrow")

    assert equal(read_drafter(tmp_path / "narrow"), drafter)
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in ("wide", "narrow")]
    assert sizes[1] < 0.6 * sizes[0]


def test_writing_replaces_the_whole_directory(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    write_plain(folder, complete(**FULL), random_tensors(complete(**FULL)))
    (folder / "training.json").write_text("{}")
    drafter = random_drafter(decode(complete()))

    write_drafter(drafter, folder)

    assert equal(read_drafter(folder), drafter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_other_files_are_ignored(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "drafter", complete(), random_tensors(complete()))
    (folder / "training.json").write_text("not even JSON")

    assert read_drafter(folder).config.slots == 4


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PspecError, match=r"cannot write to .*file"):
        write_drafter(random_drafter(decode(complete())), tmp_path / "file" / "drafter")


def test_fingerprint_covers_config_and_weights(tmp_path: Path) -> None:
    config = complete()
    one = write_plain(tmp_path / "one", config, random_tensors(config))
    same = write_plain(tmp_path / "same", config, random_tensors(config))
    other = write_plain(tmp_path / "other", config, random_tensors(config, seed=1))
    rope = write_plain(tmp_path / "rope", config | {"rope": {"theta": 5.0}}, random_tensors(config))

    prints = [drafter_fingerprint(folder) for folder in (one, same, other, rope)]

    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


# Refusals: configs

CONTRADICTIONS: dict[str, tuple[Config, str]] = {
    "format": ({"format": "eagle"}, "format is 'eagle', expected 'pspec-drafter'"),
    "version": ({"version": 2}, "version is 2, this release reads 1"),
    "slots": ({"slots": 0}, "slots is 0"),
    "layers": ({"num_layers": 0}, "num_layers is 0"),
    "target hidden": ({"target_hidden_size": 0}, "target_hidden_size is 0"),
    "target vocabulary": ({"target_vocab_size": -1}, "target_vocab_size is -1"),
    "hidden": ({"block": {"hidden_size": 0}}, "block.hidden_size is 0"),
    "intermediate": ({"block": {"intermediate_size": 0}}, "block.intermediate_size is 0"),
    "heads": ({"block": {"num_attention_heads": 0}}, "block.num_attention_heads is 0"),
    "kv heads": ({"block": {"num_key_value_heads": 0}}, "block.num_key_value_heads is 0"),
    "head size": ({"block": {"head_dim": 0}}, "block.head_dim is 0"),
    "odd head": ({"block": {"head_dim": 9}}, "block.head_dim 9 is odd"),
    "groups": ({"block": {"num_key_value_heads": 3}}, "4 is no multiple of num_key_value_heads 3"),
    "eps": ({"block": {"norm_eps": 0.0}}, "block.norm_eps is 0.0"),
    "theta": ({"rope": {"theta": -1.0}}, "rope.theta is -1.0"),
    "rope factor": (
        {"rope": {"theta": 1e4, "scaling": LLAMA3 | {"factor": 0.0}}},
        "rope.scaling.factor is 0.0",
    ),
    "rope length": (
        {"rope": {"theta": 1e4, "scaling": LLAMA3 | {"original_max_position_embeddings": 0}}},
        "rope.scaling.original_max_position_embeddings is 0",
    ),
    "rope low": (
        {"rope": {"theta": 1e4, "scaling": LLAMA3 | {"low_freq_factor": 0.0}}},
        "rope.scaling.low_freq_factor is 0.0",
    ),
    "rope band": (
        {"rope": {"theta": 1e4, "scaling": LLAMA3 | {"high_freq_factor": 1.0}}},
        "high_freq_factor 1.0 is not above 1.0",
    ),
    "no boundary": (EAGLE | {"features": []}, "features is empty"),
    "boundary twice": (EAGLE | {"features": [2, 1, 2]}, r"features \[2, 1, 2\] name a boundary"),
    "negative boundary": (EAGLE | {"features": [-1]}, r"features \[-1\]: a boundary is negative"),
    "fuse without features": (EAGLE | {"features": "none"}, "'concat-fc' does not go with"),
    "features without fuse": ({"features": "last", "shift": True}, "fuse 'none' does not go with"),
    "features without shift": (EAGLE | {"shift": False}, "features need shift: true"),
    "no mask feature": (EAGLE | {"mask_feature": "none"}, "mask_feature 'none' does not go with"),
    "mask feature, no features": ({"mask_feature": "zero"}, "mask_feature 'zero' does not go"),
    "mask feature, feature-only": (EAGLE | {"fuse": "feature-only"}, "mask_feature 'slot' does"),
    "bias of nothing": ({"fc_bias": True}, "fc_bias: true, but fuse 'none' has no fc"),
    "scale of nothing": (EAGLE | {"fuse_scale": 2.0}, "fuse_scale 2.0 goes with fuse 'scaled-add'"),
    "unread table": (
        KINDS["medusa"] | {"embedding": "own"},
        "embedding: own, but fuse 'feature-only' reads no token",
    ),
    "borrowed table of another width": (
        {"block": {"hidden_size": 24}, "head": "own"},
        "hidden_size 24 is not target_hidden_size 32",
    ),
    "borrowed head of another width": (
        {"block": {"hidden_size": 24}, "embedding": "own"},
        "hidden_size 24 is not target_hidden_size 32",
    ),
    "rows of the target's head": ({"draft_vocab_size": 60}, "draft_vocab_size needs head: own"),
    "too many rows": ({"head": "own", "draft_vocab_size": 61}, r"61 is not in 1\.\.60"),
    "no rows": ({"head": "own", "draft_vocab_size": 0}, r"draft_vocab_size 0 is not in 1\.\.60"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_named(name: str, tmp_path: Path) -> None:
    change, message = CONTRADICTIONS[name]
    config = complete(**change)
    write_plain(tmp_path / "drafter", config, {})

    with pytest.raises(ConfigError, match=message) as caught:
        read_drafter_config(tmp_path / "drafter")

    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=message):
        check_drafter(decode(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"fuse": "sum"}, r"'sum'.*\$\.fuse"),
        ({"slots": "4"}, r"\$\.slots"),
        ({"slots": 4.5}, r"\$\.slots"),
        ({"slots": None}, r"\$\.slots"),
        ({"features": "all"}, "'all'"),
        ({"features": [1, "last"]}, r"\$\.features\[1\]"),
        ({"mask_embedding": "zero"}, r"\$\.mask_embedding"),
        ({"rope": {"base": 1.0}}, "base"),
        ({"block": {"act": "silu"}}, "act"),
        ({"block": {"activation": "relu"}}, r"'relu'.*\$\.block\.activation"),
    ],
)
def test_unknown_fields_and_values_are_named(change: Config, message: str, tmp_path: Path) -> None:
    write_plain(tmp_path / "drafter", complete(**change), {})

    with pytest.raises(ConfigError, match=message) as caught:
        read_drafter_config(tmp_path / "drafter")

    assert str(tmp_path / "drafter" / "config.json") in str(caught.value)


@pytest.mark.parametrize("field", ["slots", "target_hidden_size", "target_vocab_size", "block"])
def test_missing_fields_are_named(field: str, tmp_path: Path) -> None:
    config = {name: value for name, value in complete().items() if name != field}
    write_plain(tmp_path / "drafter", config, {})

    with pytest.raises(ConfigError, match=f"`{field}`"):
        read_drafter(tmp_path / "drafter")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"slots": 4', b"\xff\xfe", b"\x00" * 64])
def test_a_damaged_config_is_refused(data: bytes, tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "drafter", complete(), random_tensors(complete()))
    (folder / "config.json").write_bytes(data)

    with pytest.raises(ConfigError, match=r"config\.json"):
        read_drafter(folder)


def test_a_directory_without_config_is_no_drafter(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=f"{folder} is no drafter directory"):
            read_drafter(folder)


# Refusals: tensors

Change = Callable[[Tensors], Any]

TENSOR_FAULTS: dict[str, tuple[Change, str]] = {
    "left over": (lambda t: t.update(extra=np.ones(1)), "holds extra, which nothing uses"),
    "misnamed": (lambda t: t.update(t2d=t.pop("d2t")), "holds t2d, which nothing uses"),
    "empty": (
        lambda t: t.update({"fc.bias": np.empty(0, np.float32)}),
        r"fc.bias has shape \[0\]",
    ),
    "d2t range": (lambda t: t["d2t"].__setitem__(3, 60), r"d2t names a token outside 0\.\.59"),
    "d2t negative": (lambda t: t["d2t"].__setitem__(0, -1), r"d2t names a token outside 0\.\.59"),
    "d2t twice": (lambda t: t["d2t"].__setitem__(0, t["d2t"][1]), "d2t names a token twice"),
    "d2t wraps": (
        lambda t: t.update(d2t=t["d2t"].astype(np.int64) + 2**32),
        r"d2t names a token outside 0\.\.59",
    ),
    "d2t float": (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), "d2t is torch.float32"),
    "integers": (
        lambda t: t.update({"norm.weight": np.ones(32, np.int64)}),
        "norm.weight is torch.int64",
    ),
    "nan": (lambda t: t["mask_feature"].__setitem__((0, 1), np.nan), "mask_feature holds a number"),
    "inf": (lambda t: t["fc.weight"].__setitem__((0, 1), np.inf), "fc.weight holds a number that"),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_tensors_that_cannot_be_used_are_named(name: str, tmp_path: Path) -> None:
    change, message = TENSOR_FAULTS[name]
    config = complete(**FULL)
    tensors = random_tensors(config)
    change(tensors)
    folder = write_plain(tmp_path / "drafter", config, tensors)

    with pytest.raises(CheckpointError, match=message) as caught:
        read_drafter(folder)

    assert str(folder) in str(caught.value)


def test_d2t_may_be_int64(tmp_path: Path) -> None:
    config = complete(**FULL)
    tensors = random_tensors(config)
    wide = tensors | {"d2t": tensors["d2t"].astype(np.int64)}

    drafters = [
        read_drafter(write_plain(tmp_path / str(number), config, each))
        for number, each in enumerate((tensors, wide))
    ]

    assert equal(*drafters)


@pytest.mark.parametrize("name", tensor_shapes(complete(**FULL)))
def test_every_missing_or_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    config = complete(**FULL)
    tensors = random_tensors(config)
    shape = list(tensors[name].shape)
    longer = np.concatenate([tensors[name], tensors[name][:1]])

    folder = write_plain(tmp_path / "drafter", config, tensors | {name: longer})
    wrong = [shape[0] + 1, *shape[1:]]
    with pytest.raises(CheckpointError) as caught:
        read_drafter(folder)
    assert f": {name} has shape {wrong}, expected {shape}" in str(caught.value)

    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"lacks {name}") + "$"):
        read_drafter(folder)


def test_a_turned_weight_is_refused(tmp_path: Path) -> None:
    config = complete(**EAGLE)
    tensors = random_tensors(config)
    tensors["fc.weight"] = np.ascontiguousarray(tensors["fc.weight"].T)
    folder = write_plain(tmp_path / "drafter", config, tensors)

    with pytest.raises(
        CheckpointError, match=r"fc\.weight has shape \[64, 32\], expected \[32, 64\]"
    ):
        read_drafter(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "drafter", complete(), random_tensors(complete()))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])

    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read") as caught:
        read_drafter(folder)

    assert "\n" not in str(caught.value)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "drafter", complete(), {})
    (folder / "model.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        read_drafter(folder)


def test_a_config_of_absurd_sizes_takes_no_memory(tmp_path: Path) -> None:
    config = complete(embedding="own", head="own", target_vocab_size=10**12)
    folder = write_plain(tmp_path / "drafter", config, random_tensors(complete()))

    with pytest.raises(CheckpointError, match=r"lacks embed_tokens\.weight"):
        read_drafter(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 10**9}, r"num_layers is 1000000000, but model\.safetensors holds \d+ "),
        ({"slots": 10**18}, "impossible sizes"),
        ({"slots": 10**30}, "impossible sizes"),
    ],
)
def test_a_config_of_absurd_sizes_takes_no_time(
    tmp_path: Path, change: Config, message: str
) -> None:
    folder = write_plain(tmp_path / "drafter", complete(), random_tensors(complete()))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))

    with pytest.raises(CheckpointError, match=message):
        read_drafter(folder)


# The target it belongs to

TARGET = TargetConfig("llama", 60, 2, BlockConfig(32, 48, 4, 2, 10), RopeConfig(), False, 64)


def test_a_drafter_of_this_target_is_taken(tmp_path: Path) -> None:
    for features in ("last", [0, 1, 2]):
        check_match(decode(complete(**(EAGLE | {"features": features}))), TARGET, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_vocab_size": 61}, "target_vocab_size is 61, the target has 60"),
        ({"target_hidden_size": 33}, "target_hidden_size is 33, the target has 32"),
        (EAGLE | {"features": [0, 3]}, r"boundary 3 is not in 0\.\.2, the target's range"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    change: Config, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_match(decode(complete(**change)), TARGET, tmp_path)


# A drafter to train


def random_target(tied: bool = False) -> Decoder:
    block = TARGET.block
    target = Decoder(TargetConfig("llama", 60, 2, block, RopeConfig(), tied, 64))
    generator = torch.Generator().manual_seed(0)
    for parameter in target.requires_grad_(False).parameters():
        parameter.normal_(generator=generator)
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_an_initial_drafter_can_be_written_and_read(kind: str, tmp_path: Path) -> None:
    drafter = initial_drafter(random_target(), decode(complete(**KINDS[kind])))

    write_drafter(drafter, tmp_path / "drafter")

    assert equal(read_drafter(tmp_path / "drafter"), drafter)


def test_an_initial_drafter_takes_what_fits_from_the_target() -> None:
    target = random_target()
    config = decode(complete(**EAGLE, embedding="own", head="own"))

    drafter = initial_drafter(target, config)

    last = target.layers[1].state_dict()
    own = drafter.layers[0].state_dict()
    assert all(torch.equal(own[name], last[name]) for name in last)
    assert torch.equal(drafter.embed_tokens.weight, target.embed_tokens.weight)
    assert target.lm_head is not None
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)
    assert torch.equal(drafter.norm.weight, target.norm.weight)
    assert 0 < drafter.mask_embedding.abs().max() < 0.2
    tied = random_target(tied=True)
    assert torch.equal(initial_drafter(tied, config).lm_head.weight, tied.embed_tokens.weight.T)


def test_an_initial_drafter_may_have_another_width() -> None:
    fields = {"embedding": "own", "head": "own", "block": {"hidden_size": 24}}

    drafter = initial_drafter(random_target(), decode(complete(**fields)))

    assert torch.equal(drafter.norm.weight, torch.ones(24))


def test_the_default_drafter_fits_its_target(tmp_path: Path) -> None:
    config = initial_config(random_target(), slots=6, num_layers=2)

    check_match(config, TARGET, tmp_path)
    assert (config.slots, config.num_layers, config.features) == (6, 2, (1, 2))


# The document


def fields_of(kind: type[msgspec.Struct]) -> set[str]:
    return set(kind.__struct_fields__)


@pytest.mark.parametrize("kind", [DrafterConfig, BlockConfig, RopeConfig, Llama3Scaling])
def test_every_field_is_documented(kind: type[msgspec.Struct]) -> None:
    named = set(re.findall(r"`(\w+)`", DOC.read_text(encoding="utf-8")))

    assert fields_of(kind) <= named


def test_the_table_of_fields_is_complete_and_states_the_defaults() -> None:
    text = DOC.read_text(encoding="utf-8")
    section = text[text.index("## config.json") : text.index("## model.safetensors")]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|", section, re.MULTILINE)
    cells = {name: cell.strip(" `") for name, cell in rows}

    assert cells.keys() == fields_of(DrafterConfig)
    assert {name: json.loads(cell) for name, cell in cells.items() if cell} == DEFAULTS


def test_every_tensor_is_documented() -> None:
    text = DOC.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w.{}]+)` \| \[", text, re.MULTILINE))
    shapes = {**tensor_shapes(complete(**FULL))}

    assert named == {re.sub(r"layers\.\d+", "layers.{i}", name) for name in shapes}
    made = Drafter(decode(complete(**FULL))).state_dict().keys()
    assert made == shapes.keys()


def test_every_choice_is_documented() -> None:
    text = DOC.read_text(encoding="utf-8")
    named = {word.strip('"') for word in re.findall(r'`[\w: ]*?("?[\w-]+"?)`', text)}

    for name in ("fuse", "mask_feature", "mask_embedding", "embedding", "head", "slot_attention"):
        assert literals(DrafterConfig, name) <= named, name
    assert literals(BlockConfig, "activation") <= named


def literals(kind: type[msgspec.Struct], name: str) -> set[str]:
    field = next(f for f in msgspec.inspect.type_info(kind).fields if f.name == name)  # type: ignore[attr-defined]
    assert isinstance(field.type, msgspec.inspect.LiteralType)
    return {str(value) for value in field.type.values}


def test_the_writer_in_the_document_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOC.read_text(encoding="utf-8")
    code = text[text.index("```python") :].removeprefix("```python").split("```")[0]
    monkeypatch.chdir(tmp_path)

    exec(compile(code, str(DOC), "exec"), {})

    drafter = read_drafter(tmp_path / "drafter")
    assert drafter.config.block.head_dim == 16
    assert drafter.state_dict()["layers.0.self_attn.k_proj.weight"].shape == (64, 32)
