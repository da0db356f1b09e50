"""``pspec calibrate`` from end to end, and ``--nodes auto`` over curves that are made up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bundles import TinyBundle
from commands import RUNTIME_ONLY, call, contents, copy_folder, read_manifest, seal, spawn
from curves import DEVICE, made_up_curve
from pspec.calibrate.curve import measured_lengths
from pspec.calibrate.store import calibration_text, save_curve
from pspec.errors import RequestError
from pspec.files import only_writer
from pspec.runtime.bundle import check_hashes, open_bundle
from pspec.runtime.calibration import CALIBRATION_FILE, Curve, read_calibration, this_device
from pspec.runtime.drafter import Drafter
from pspec.runtime.engines import ENGINES, build_engine
from pspec.runtime.generate import DraftMode, GenerationConfig, Generator
from pspec.runtime.manifest import ShapePlan
from pspec.runtime.replay import Kind, ReplayDrafter

QUICK = ("--repeats", "1", "--threads", "1")
KINDS: tuple[Kind, ...] = ("oracle", "anti-oracle", "second-best")
FLAT: dict[int, float] = {1: 20.0, 2: 20.5, 4: 21.0, 8: 22.0}
STEEP: dict[int, float] = {1: 10.0, 2: 14.0, 4: 22.0, 8: 60.0}


def made_up(bundle: Path, verify: dict[int, float] = FLAT, **options: Any) -> Curve:
    """A curve of this device and this export."""
    options = {"device": this_device("onnxruntime", None), **options}
    return made_up_curve(
        lambda length, nodes: verify[nodes] + length / 100,
        draft_ms=3.0,
        export=read_manifest(bundle).checksum,
        **options,
    )


@pytest.fixture
def bundle(llama_bundle: TinyBundle, tmp_path: Path) -> Path:
    """A bundle to write to."""
    return copy_folder(llama_bundle.folder, tmp_path / "bundle")


# --- measuring ------------------------------------------------------------------------------------


def test_calibrate_keeps_a_curve_in_the_bundle(bundle: Path) -> None:
    build_engine(open_bundle(bundle))
    before = contents(bundle)
    value = json.loads(call("calibrate", bundle, *QUICK, "--json").went_well())

    assert list(value) == ["device", "files", "curve"]
    names = [f"reports/calibration.{kind}" for kind in ("json", "md", "png")]
    assert value["files"] == [str(bundle / name) for name in names]
    after = contents(bundle)
    assert sorted(after.keys() - before.keys()) == names
    assert {name: after[name] for name in before} == before
    assert after[names[2]].startswith(b"\x89PNG")
    curve = read_calibration(bundle).devices[value["device"]]
    assert msgspec.convert(value["curve"], Curve) == curve
    check_curve(curve, bundle)
    assert value["device"] in after[names[1]].decode()


def check_curve(curve: Curve, bundle: Path) -> None:
    """Every case of the plan was measured, on this device."""
    manifest = read_manifest(bundle)
    assert curve.device == this_device("onnxruntime", 1)
    assert curve.export == manifest.checksum
    assert curve.nodes == [2, 4, 8]  # the fused engine has no call of one row
    assert curve.lengths == measured_lengths(manifest.plan) == [1, 91]
    assert [cost.length for cost in curve.draft] == curve.lengths
    assert {"off", "bundle"} <= {cost.draft for cost in curve.host} <= {"off", "lookup", "bundle"}
    times = [*(cost.time for cost in curve.verify), *(cost.time for cost in curve.draft)]
    for time in [*times, *(cost.time for cost in curve.host)]:
        assert 0 < time.low <= time.ms <= time.high < 60_000


def test_a_calibrated_bundle_is_still_the_one_that_was_exported(bundle: Path) -> None:
    save_curve(bundle, made_up(bundle))

    assert call("verify", bundle).went_well().endswith(": ok\n")
    opened = open_bundle(bundle)
    check_hashes(opened)
    assert not [name for name in opened.manifest.files if "calibration" in name]
    Generator.open(bundle)


def test_calibrate_shows_a_table_and_says_where_it_lies(bundle: Path) -> None:
    build_engine(open_bundle(bundle))
    done = spawn("calibrate", bundle, *QUICK, without=[*RUNTIME_ONLY, "matplotlib"])

    text = done.went_well()
    for name in ("1 threads, onnxruntime", "verify 2", "verify 8", "draft", "host, off", "91/96"):
        assert name in text
    assert f"{bundle}/reports/calibration.json\n{bundle}/reports/calibration.md\n" in text
    assert text.endswith("no plot: pip install 'pspec-toolkit[plot]'\n")
    assert not (bundle / "reports" / "calibration.png").exists()


def test_measuring_again_replaces_the_own_entry_only(bundle: Path) -> None:
    export = read_manifest(bundle).checksum
    other = made_up_curve(lambda length, nodes: 1.0 * nodes, export=export)
    first = made_up(bundle)
    save_curve(bundle, other)
    save_curve(bundle, first)
    assert read_calibration(bundle).devices == {DEVICE.key: other, first.device.key: first}

    again = made_up(bundle, STEEP)
    files = save_curve(bundle, again)

    assert read_calibration(bundle).devices == {DEVICE.key: other, again.device.key: again}
    table = files[1].read_text(encoding="utf-8")
    assert table == calibration_text([other, again])
    assert table.count("## ") == 2
    assert not [path for path in bundle.rglob("*") if path.name.startswith(".")]


def test_curves_of_another_export_go(bundle: Path) -> None:
    save_curve(bundle, made_up_curve(lambda length, nodes: 1.0, export="another"))
    mine = made_up(bundle)
    save_curve(bundle, mine)
    assert list(read_calibration(bundle).devices) == [mine.device.key]


def test_a_picture_of_other_curves_does_not_stay(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save_curve(bundle, made_up(bundle))[2].exists()
    monkeypatch.setitem(__import__("sys").modules, "pspec.calibrate.picture", None)
    files = save_curve(bundle, made_up(bundle))
    assert [file.suffix for file in files] == [".json", ".md"]
    assert not (bundle / "reports" / "calibration.png").exists()


def test_one_calibration_at_a_time(bundle: Path) -> None:
    with only_writer(bundle / "reports"):
        call("calibrate", bundle, *QUICK).refused("reports", "another process")


def test_what_cannot_be_calibrated_is_refused(bundle: Path, tmp_path: Path) -> None:
    call("calibrate", tmp_path / "nowhere").refused("nowhere", "is no bundle")
    call("calibrate", bundle, "--repeats", "0").refused("--repeats")
    call("calibrate", bundle, "--engine", "frob").refused("'frob'", "onnxruntime")
    done = spawn("calibrate", bundle, *QUICK, without=["onnxruntime"])
    done.refused("onnxruntime", "pip install 'pspec-toolkit[cpu]'")
    assert not list(bundle.glob("reports/calibration.*"))

    plan = msgspec.structs.replace(read_manifest(bundle).plan, batch=2)
    seal(bundle, plan=plan)
    call("calibrate", bundle, *QUICK).refused("batches of 2", "--batch 1")


@pytest.mark.parametrize("text", ["{", '{"schema_version": 9, "devices": {}}'])
def test_a_damaged_calibration_is_one_line_and_stays(bundle: Path, text: str) -> None:
    path = bundle / CALIBRATION_FILE
    path.write_text(text, encoding="utf-8")
    auto = ("generate", bundle, "--prompt", "x", "--nodes", "auto")
    for arguments in (("calibrate", bundle, *QUICK), auto):
        call(*arguments).refused(str(path), "delete it")
    assert path.read_text(encoding="utf-8") == text
    call("generate", bundle, "--prompt", "x", "--max-new-tokens", "1", "--json").went_well()


@pytest.mark.parametrize(
    ("buckets", "accepted", "lengths"),
    [
        ((96,), 5, [1, 91]),
        ((256, 512, 1024), 6, [1, 250, 256, 506, 512, 1018]),
        ((256, 257), 6, [1, 250]),  # no round begins in the last bucket that ends in it
        ((256, 300), 6, [1, 250, 256, 294]),
        ((7,), 5, [1, 2]),
        ((3,), 1, [1, 2]),
    ],
)
def test_each_bucket_is_measured_hardly_entered_and_full(
    buckets: tuple[int, ...], accepted: int, lengths: list[int]
) -> None:
    assert measured_lengths(ShapePlan(1, 8, accepted, 64, buckets)) == lengths


def test_a_context_without_room_for_a_round_is_refused() -> None:
    with pytest.raises(RequestError, match="context of 6 tokens is too short to calibrate"):
        measured_lengths(ShapePlan(1, 8, 5, 64, (6,)))


# --- choosing -------------------------------------------------------------------------------------


def test_auto_without_a_calibration_names_the_command(bundle: Path) -> None:
    auto = ("generate", bundle, "--prompt", "x", "--nodes", "auto")
    call(*auto).refused("no calibration for this device", f"pspec calibrate {bundle}, or")
    save_curve(bundle, made_up(bundle))
    call(*auto, "--max-new-tokens", "4", "--json").went_well()
    call(*auto, "--threads", "1").refused("1 threads", f"pspec calibrate {bundle} --threads 1")
    call(*auto, "--engine", "standard").refused(f"pspec calibrate {bundle} --engine standard")
    save_curve(bundle, msgspec.structs.replace(made_up(bundle), export="another"))
    call(*auto).refused("of another export", f"pspec calibrate {bundle}")


def test_auto_of_the_command_is_lossless(bundle: Path) -> None:
    assert call("calibrate", bundle, "--repeats", "1").went_well()
    generate = ("generate", bundle, "--prompt", "one two one two", "--max-new-tokens", "40")
    wanted = json.loads(call(*generate, "--draft", "off", "--json").went_well())["token_ids"]
    for draft in ("auto", "lookup", "bundle", "off"):
        text = call(*generate, "--draft", draft, "--nodes", "auto", "--json").went_well()
        assert json.loads(text)["token_ids"] == wanted


def test_chat_takes_auto(bundle: Path) -> None:
    options = ("--nodes", "auto", "--max-new-tokens", "4")
    spawn("chat", bundle, *options, typed="hello\n").refused("pspec calibrate")
    save_curve(bundle, made_up(bundle))
    typed = "hello\nhello\n"
    wanted = spawn("chat", bundle, "--max-new-tokens", "4", typed=typed).went_well()
    assert spawn("chat", bundle, *options, typed=typed).went_well() == wanted


@pytest.mark.parametrize("nodes", ["frob", "0", "-1", "2.5", ""])
def test_nodes_are_a_number_or_auto(bundle: Path, nodes: str) -> None:
    call("generate", bundle, "--prompt", "x", "--nodes", nodes).refused(
        f"--nodes {nodes}:", "1 or more, or auto"
    )


def answer(
    generator: Generator, mode: str, prompt: list[int], known: list[int], **settings: Any
) -> tuple[list[int], Any]:
    """Token ids and statistics; ``known`` is what replay drafters replay."""
    drafter: Drafter | None = None
    draft: DraftMode = "off"
    if mode in KINDS:
        vocab_size = generator.bundle.manifest.target.vocab_size
        drafter = ReplayDrafter(mode, prompt + known, 4, vocab_size)
    else:
        draft = mode  # type: ignore[assignment]
    options: dict[str, Any] = {"eos_token_id": (), "max_new_tokens": 60, **settings}
    config = GenerationConfig(draft=draft, **options)
    stream = generator.stream_generate(prompt, config, drafter)
    try:
        while True:
            next(stream)
    except StopIteration as end:
        return end.value.token_ids, end.value.stats


@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("family", ["llama_bundle", "qwen3_bundle"])
def test_auto_is_lossless_in_every_mode(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, costs: dict[int, float]
) -> None:
    exported: TinyBundle = request.getfixturevalue(family)
    folder = copy_folder(exported.folder, tmp_path / "bundle")
    save_curve(folder, made_up(folder, costs))
    generator = Generator.open(folder)
    for prompt in ([7, 8, 9, 7, 8, 9, 7, 8], [11], list(range(3, 60))):
        known, _ = answer(generator, "off", prompt, [])
        for mode in ("lookup", "bundle", *KINDS):
            for settings in ({}, {"max_new_tokens": 7}, {"eos_token_id": (known[20],)}):
                plain, _ = answer(generator, "off", prompt, [], **settings)
                fixed, _ = answer(generator, mode, prompt, known, **settings)
                found, stats = answer(generator, mode, prompt, known, nodes="auto", **settings)
                assert found == plain == fixed, (mode, settings)
                assert stats.committed == len(found) - 1


@pytest.mark.parametrize("engine", ENGINES)
def test_auto_takes_what_pays(bundle: Path, engine: str) -> None:
    costs = {1: 20.0, 2: 23.0, 4: 26.0, 8: 30.0}
    save_curve(bundle, made_up(bundle, costs, device=this_device(engine, None)))
    generator = Generator.open(bundle, engine=engine)
    prompt = [5, 6, 7]
    known, _ = answer(generator, "off", prompt, [])
    shapes = record_shapes(generator)
    _, right = answer(generator, "oracle", prompt, known, nodes="auto")
    oracle = Counter(shapes)
    shapes.clear()
    _, wrong = answer(generator, "anti-oracle", prompt, known, nodes="auto")

    assert right.tau > 3
    chain = 8 if engine == "standard" else 5  # four drafts and their root, padded or not
    assert oracle.most_common(1)[0][0] == chain
    assert wrong.tau == 1
    least = 1 if engine == "standard" else 2
    assert Counter(shapes).most_common(1)[0][0] == least  # a small tree runs a small shape
    assert wrong.drafted < wrong.rounds / 2


def record_shapes(generator: Generator) -> list[int]:
    """The shapes of verify calls from now on."""
    engine = generator.decode(GenerationConfig(draft="off")).target.engine
    found: list[int] = []
    bind: Callable[..., Any] = engine.bind

    def recording(count: int, logit_rows: int = 0) -> Any:
        if count == logit_rows:
            found.append(count)
        return bind(count, logit_rows)

    engine.bind = recording  # type: ignore[method-assign]
    return found


def test_auto_learns_across_requests_and_kinds_apart(bundle: Path) -> None:
    save_curve(bundle, made_up(bundle, FLAT))
    generator = Generator.open(bundle)
    config = GenerationConfig(nodes="auto", eos_token_id=())
    budgets = [generator.decode(config).tree.budget for _ in range(2)]
    assert budgets[0] is budgets[1]
    other = generator.decode(GenerationConfig(nodes="auto", draft="lookup")).tree.budget
    assert other is not budgets[0]
    assert generator.decode(GenerationConfig()).tree.budget is not budgets[0]


def test_a_drafter_that_never_pays_is_hardly_called(bundle: Path) -> None:
    save_curve(bundle, made_up(bundle, {1: 5.0, 2: 9.0, 4: 18.0, 8: 40.0}))
    generator = Generator.open(bundle)
    _, fixed = answer(generator, "bundle", [5, 6, 7], [])
    _, auto = answer(generator, "bundle", [5, 6, 7], [], nodes="auto")
    assert fixed.tau < 1.5, "the test's drafter is better than thought"
    assert auto.drafted < fixed.drafted / 20
