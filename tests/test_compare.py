"""The rule that says whether two runs of a graph agree, and the inputs it is asked on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pspec.runtime.compare import TOLERANCE, compare_outputs
from pspec.runtime.manifest import GraphSpec, TensorSpec
from pspec.runtime.probe import FILLINGS, probe_feeds

VOCAB = 50
Arrays = dict[str, NDArray[Any]]


def target_outputs() -> Arrays:
    """Two rows of one batch; tokens 3 and 4 of the second hardly differ."""
    logits = np.arange(10, dtype=np.float32).reshape(1, 2, 5)
    logits[0, 1] = [0, 1, 2, 3, 3 - TOLERANCE / 2]
    return {"next_token": np.array([[4, 3]], np.int32), "logits": logits}


def draft_outputs() -> Arrays:
    """One slot of four candidates, of which the second and third hardly differ."""
    logprobs = np.array([[[-1, -2, -2 - TOLERANCE / 2, -3]]], np.float32)
    return {"draft_ids": np.array([[[7, 8, 9, 10]]], np.int32), "draft_logprobs": logprobs}


def changed(outputs: Arrays, name: str, place: tuple[int, ...], value: float) -> Arrays:
    array = outputs[name].copy()
    array[place] = value
    return outputs | {name: array}


@pytest.mark.parametrize("outputs", [target_outputs(), draft_outputs()])
def test_equal_outputs_pass(outputs: Arrays) -> None:
    found = compare_outputs(outputs, outputs)
    assert (found.error, found.agree, found.near_ties, found.faults) == (0.0, 1.0, 0, ())
    assert found.passed


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["have", "want", "both"])
def test_a_value_that_is_not_finite_fails(value: float, side: str) -> None:
    good = target_outputs()
    # The first place: a comparison that keeps the larger of two forgets a NaN that comes first.
    bad = changed(good, "logits", (0, 0, 0), value)
    found = compare_outputs(good if side == "want" else bad, good if side == "have" else bad)
    assert found.error == float("inf")
    assert found.faults == ("logits differs by inf",)


def test_a_difference_is_relative_to_the_scale() -> None:
    want = {"feature": np.array([100.0, 0.0], np.float32)}
    for apart, passed in ((0.9, True), (1.1, False)):
        have = {"feature": want["feature"] + np.float32(100 * TOLERANCE * apart)}
        assert compare_outputs(have, want).passed == passed


@pytest.mark.parametrize("kind", ["missing", "shape", "type"])
def test_another_output_fails(kind: str) -> None:
    want = target_outputs()
    have = dict(want)
    if kind == "missing":
        del have["logits"]
    elif kind == "shape":
        have["logits"] = have["logits"][:, :1]
    else:
        have["next_token"] = have["next_token"].astype(np.int64)
    assert not compare_outputs(have, want).passed


@pytest.mark.parametrize(
    ("row", "token", "near"), [(1, 4, 1), (1, 2, 0), (0, 3, 0), (0, -1, 0), (0, 5, 0)]
)
def test_a_token_may_only_differ_in_a_near_tie(row: int, token: int, near: int) -> None:
    want = target_outputs()
    found = compare_outputs(changed(want, "next_token", (0, row), token), want)
    assert (found.agree, found.near_ties, found.passed) == (0.5, near, bool(near))
    assert near or found.faults == ("next_token differs in 1 of 2 ids",)


@pytest.mark.parametrize(
    ("ids", "passed"),
    [
        ([7, 9, 8, 10], True),  # changed places with its like
        ([8, 7, 9, 10], False),
        ([7, 8, 9, 11], True),  # one beyond the list may tie with the last
        ([11, 8, 9, 10], False),
    ],
)
def test_candidates_may_only_change_places_in_a_near_tie(ids: list[int], passed: bool) -> None:
    want = draft_outputs()
    have = want | {"draft_ids": np.array([[ids]], np.int32)}
    assert compare_outputs(have, want).passed == passed


def test_integers_without_scores_must_be_equal() -> None:
    want = {"count": np.array([1, 2], np.int32)}
    assert not compare_outputs({"count": np.array([1, 3], np.int32)}, want).passed


# --- the inputs -----------------------------------------------------------------------------------


def graph(role: str, batch: int, count: int, slots: int, rows: int = 1) -> GraphSpec:
    """A static graph's inputs."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "token_ids": ((batch, count), "int32"),
        "cache_length": ((batch,), "int32"),
        "past_key.0": ((batch, 2, slots, 4), "float32"),
    }
    if role == "target":
        shapes |= {
            "position_ids": ((batch, count), "int32"),
            "tree_mask": ((batch, count, count), "bool"),
            "logit_rows": ((batch, rows), "int32"),
        }
    else:
        shapes |= {"token_count": ((batch,), "int32"), "feature": ((batch, count, 3), "float16")}
    inputs = tuple(TensorSpec(name, *spec) for name, spec in shapes.items())  # type: ignore[arg-type]
    return GraphSpec(f"{role}{count}", role, {"slots": slots}, inputs, ())  # type: ignore[arg-type]


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize(("count", "slots"), [(1, 24), (8, 24), (16, 16), (16, 5)])
def test_target_inputs_are_trees_over_a_cache(count: int, slots: int, filling: str) -> None:
    spec = graph("target", 2, count, slots, rows=count)
    feeds = probe_feeds(spec, VOCAB, filling)

    assert all(feeds[each.name].shape == each.shape for each in spec.inputs)
    assert all(feeds[each.name].dtype == each.dtype for each in spec.inputs)
    assert ((feeds["token_ids"] >= 0) & (feeds["token_ids"] < VOCAB)).all()
    assert (feeds["cache_length"] + count <= max(slots, count)).all()
    assert (feeds["cache_length"] >= 0).all()
    for mask, positions, filled in zip(
        feeds["tree_mask"], feeds["position_ids"], feeds["cache_length"], strict=True
    ):
        assert mask.diagonal().all()
        assert not np.triu(mask, 1).any()
        # A node's depth is the number of its ancestors.
        assert positions.tolist() == np.minimum(filled + mask.sum(1) - 1, slots - 1).tolist()
    assert sorted(feeds["logit_rows"][0]) == list(range(count))


def test_target_inputs_branch_and_vary() -> None:
    spec = graph("target", 4, 8, 100)
    feeds = probe_feeds(spec, VOCAB, "part")
    depths = feeds["tree_mask"].sum(2) - 1
    assert (depths.max(1) < 7).any(), "no tree branches"
    assert (depths.max(1) > 1).all()
    assert len(set(feeds["cache_length"].tolist())) > 1
    assert set(probe_feeds(spec, VOCAB, "full")["cache_length"].tolist()) == {92}
    again = probe_feeds(spec, VOCAB, "part")
    assert all(np.array_equal(array, again[name]) for name, array in feeds.items())


@pytest.mark.parametrize(("count", "slots"), [(1, 24), (5, 24), (16, 5)])
def test_drafter_inputs_have_rows_that_count(count: int, slots: int) -> None:
    spec = graph("drafter", 3, count, slots)
    for filling in FILLINGS:
        feeds = probe_feeds(spec, VOCAB, filling)
        assert all(feeds[each.name].dtype == each.dtype for each in spec.inputs)
        counts = feeds["token_count"]
        assert ((counts >= 1) & (counts <= count)).all()
        assert (feeds["cache_length"] + counts <= slots).all()
