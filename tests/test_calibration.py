"""Curves as they are kept and read, and what lies between their points."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curves import made_up_curve
from pspec.errors import BundleError
from pspec.runtime.calibration import (
    CALIBRATION_FILE,
    CALIBRATION_VERSION,
    Calibration,
    Curve,
    Device,
    read_calibration,
    this_device,
)
from pspec.runtime.round_cost import RoundCost, ascending

HOST = {"off": 0.25, "lookup": 0.5, "bundle": 0.75}


def linear(length: int, nodes: int) -> float:
    return 10.0 + nodes + length / 10


def stored(folder: Path, text: bytes) -> Path:
    path = folder / CALIBRATION_FILE
    path.parent.mkdir()
    path.write_bytes(text)
    return path


def encoded(curve: Curve, **changes: Any) -> bytes:
    """A file with one curve, some of whose values are replaced."""
    value = msgspec.to_builtins(Calibration(CALIBRATION_VERSION, {"device": curve}))
    value["devices"]["device"] |= changes
    return msgspec.json.encode(value)


def test_what_was_never_calibrated_has_no_curves(tmp_path: Path) -> None:
    assert read_calibration(tmp_path).devices == {}


def test_a_curve_is_read_as_it_was_written(tmp_path: Path) -> None:
    curve = made_up_curve(linear, draft_ms=2.0, host=HOST)
    stored(tmp_path, encoded(curve))
    assert read_calibration(tmp_path).devices == {"device": curve}


GOOD = made_up_curve(linear, draft_ms=2.0, host=HOST)
PARTS = msgspec.to_builtins(GOOD)
FREE = [{**cost, "time": {"ms": 0.0, "low": 0.0, "high": 0.0}} for cost in PARTS["verify"]]
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"schema_version": 1, "devices": {"\xff": 1}}',
    "a list": b"[]",
    "keys missing": b"{}",
    "a key unknown": b'{"schema_version": 1, "devices": {}, "more": 1}',
    "cut": encoded(GOOD)[:-40],
    "a call that takes less than no time": encoded(
        GOOD, host=[{"draft": "off", "time": {"ms": -1.0, "low": 0.0, "high": 0.0}}]
    ),
    "a call that takes no time": encoded(made_up_curve(linear), verify=FREE),
    "no nodes": encoded(GOOD, verify=[{**PARTS["verify"][0], "nodes": 0}]),
    "nothing measured": encoded(GOOD, verify=[]),
    "a gap": encoded(GOOD, verify=PARTS["verify"][:-1]),
    "a case twice": encoded(GOOD, verify=[*PARTS["verify"], PARTS["verify"][0]]),
    "no plain round": encoded(GOOD, host=PARTS["host"][1:]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    path = stored(tmp_path, DAMAGE[kind])
    with pytest.raises(BundleError, match="is damaged") as caught:
        read_calibration(tmp_path)
    text = str(caught.value)
    assert str(path) in text
    assert f"delete it and run pspec calibrate {tmp_path}" in text
    assert "\n" not in text


def test_a_folder_in_its_place_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / CALIBRATION_FILE).mkdir(parents=True)
    with pytest.raises(BundleError, match=CALIBRATION_FILE):
        read_calibration(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, b'{"schema_version": 2, "devices": {}}')
    with pytest.raises(BundleError, match="has schema version 2, this release reads 1"):
        read_calibration(tmp_path)


def test_a_device_is_its_processor_cores_threads_and_engine() -> None:
    pytest.importorskip("onnxruntime")
    device = this_device("onnxruntime", 2)
    assert device == this_device("onnxruntime", 2)
    assert device.cpu.strip()
    assert device.cores >= 1
    changes: list[dict[str, Any]] = [
        {"cpu": "other"},
        {"cores": 77},
        {"threads": 3},
        {"threads": None},
        {"engine": "other"},
        {"engine_version": "0"},
    ]
    keys = {msgspec.structs.replace(device, **change).key for change in changes}
    assert len(keys | {device.key}) == len(changes) + 1


def test_the_key_of_a_device_is_readable() -> None:
    assert Device("A CPU", 4, None, "ort", "1.2").key == "A CPU, 4 cores, default threads, ort 1.2"


# --- between the points ---------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["off", "lookup", "bundle", "oracle"])
def test_measured_points_cost_what_was_measured(draft: str) -> None:
    curve = made_up_curve(linear, draft_ms=2.0, host=HOST)
    cost = RoundCost(curve, draft, curve.nodes)
    more = HOST.get(draft, HOST["off"]) + (2.0 if draft == "bundle" else 0.0)

    for length in curve.lengths:
        wanted = [linear(length, n) + (more if n > 1 else HOST["off"]) for n in curve.nodes]
        assert cost.at(length) == pytest.approx(wanted)
    assert cost.pays_for_drafts == (draft == "bundle")


def test_lengths_and_sizes_between_are_linear_and_beyond_are_level() -> None:
    curve = made_up_curve(linear, lengths=(10, 30), nodes=(1, 4, 8))
    cost = RoundCost(curve, "off", (1, 3, 8))

    assert cost.at(20) == pytest.approx([linear(20, 1), linear(20, 3), linear(20, 8)])
    assert cost.at(0) == cost.at(10)
    assert cost.at(99) == cost.at(30)


@given(
    st.lists(st.floats(1, 100), min_size=8, max_size=8),
    st.lists(st.integers(1, 16), min_size=2, max_size=9, unique=True),
    st.integers(0, 120),
)
def test_more_nodes_never_cost_less(noise: list[float], sizes: list[int], length: int) -> None:
    places = {(at, count): ms for (at, count), ms in zip(PLACES, noise, strict=True)}
    curve = made_up_curve(lambda at, count: places[at, count], nodes=(1, 2, 8, 16))
    found = RoundCost(curve, "off", sorted(sizes)).at(length)
    assert all(a <= b + 1e-9 for a, b in pairwise(found))


PLACES = [(length, count) for length in (1, 90) for count in (1, 2, 8, 16)]


@given(st.lists(st.floats(0, 100), max_size=7))
def test_ascending_is_the_nearest_ascending_sequence(values: list[float]) -> None:
    assert ascending(values) == pytest.approx(nearest_ascending(values))


def nearest_ascending(values: Sequence[float]) -> list[float]:
    """Isotonic regression by its min-max formula."""
    count = len(values)
    return [
        max(
            min(sum(values[i : j + 1]) / (j + 1 - i) for j in range(k, count)) for i in range(k + 1)
        )
        for k in range(count)
    ]


def test_ascending_leaves_an_ascending_sequence_alone() -> None:
    values = sorted(random.Random(0).random() for _ in range(9))
    assert ascending(values) == values
