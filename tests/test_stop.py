from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from pspec.errors import RequestError
from pspec.runtime.detokenizer import Detokenizer
from pspec.runtime.stop import StopText, cut

EOS = frozenset({7, 9})


@pytest.mark.parametrize(
    ("ids", "budget", "kept", "reason"),
    [
        ([1, 2, 3], 5, [1, 2, 3], None),
        ([1, 7, 3], 5, [1, 7], "stop"),
        ([9, 7, 3], 5, [9], "stop"),
        ([1, 2, 7], 3, [1, 2, 7], "stop"),  # the budget's last token is an end token
        ([1, 2, 7], 2, [1, 2], "length"),  # the end token comes too late
        ([1, 2, 3], 3, [1, 2, 3], "length"),
        ([1, 2, 3], 0, [], "length"),
        ([7], 0, [], "length"),
        ([], 4, [], None),
        ([], 0, [], "length"),
    ],
)
def test_cut(ids: list[int], budget: int, kept: list[int], reason: str | None) -> None:
    assert cut(ids, EOS, budget) == (kept, reason)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 14), st.data())
def test_cutting_block_by_block_equals_cutting_token_by_token(
    ids: list[int], budget: int, data: st.DataObject
) -> None:
    def run(size: int) -> tuple[list[int], str | None]:
        out: list[int] = []
        for start in range(0, len(ids), size):
            kept, reason = cut(ids[start : start + size], EOS, budget - len(out))
            out += kept
            if reason is not None:
                return out, reason
        return out, None

    assert run(data.draw(st.integers(1, 12))) == run(1)


def test_cut_takes_array_elements_and_returns_ints() -> None:
    kept, _ = cut(list(np.array([1, 2], np.int32)), EOS, 5)
    assert [type(token) for token in kept] == [int, int]


def test_cut_refuses_a_negative_budget() -> None:
    with pytest.raises(ValueError, match="negative"):
        cut([1], EOS, -1)


def run(stops: list[str], pieces: list[str]) -> tuple[str, int | None]:
    """Text shown, and the index of the piece that completed a stop."""
    matcher = StopText(stops)
    shown = ""
    for index, piece in enumerate(pieces):
        text, stopped = matcher.feed(piece)
        shown += text
        if stopped:
            return shown + matcher.flush(), index
    return shown + matcher.flush(), None


def reference(stops: list[str], pieces: list[str]) -> tuple[str, int | None]:
    """Search the whole text again after every piece."""
    text = ""
    for index, piece in enumerate(pieces):
        text += piece
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], index
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["\n\n"], ["a\n", "b", "\n", "\nc"], ("a\nb", 3)),
        (["STOP"], ["a S", "T", "OP b"], ("a ", 2)),
        (["STOP"], ["a S", "T"], ("a ST", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", 3)),  # falls back inside the stop
        (["b", "abc"], ["abc"], ("", 0)),  # same token: the earlier start wins
        (["b", "abc"], ["ab", "c"], ("a", 0)),  # the earlier token wins
        (["c", "bc", "abc"], ["ab", "c"], ("", 1)),
        (["x", "x"], ["ax"], ("a", 0)),
        (["é🎉"], ["é", "🎉"], ("", 1)),
        ([], ["a", "b"], ("ab", None)),
        (["a"], ["", "", "a"], ("", 2)),
    ],
)
def test_stop_strings(
    stops: list[str], pieces: list[str], expected: tuple[str, int | None]
) -> None:
    assert run(stops, pieces) == expected == reference(stops, pieces)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("ab", max_size=4), max_size=12),
)
def test_equals_a_search_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == reference(stops, pieces)


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("ab", max_size=4), max_size=12),
)
def test_withholds_only_what_may_begin_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopText(stops)
    text = shown = ""
    for piece in pieces:
        new, stopped = matcher.feed(piece)
        if stopped:
            return
        text, shown = text + piece, shown + new
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_is_released_after_a_match() -> None:
    matcher = StopText(["b"])
    assert matcher.feed("abc") == ("a", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""


def test_pending_text_is_looked_at_but_not_taken() -> None:
    matcher = StopText(["aa"])
    assert matcher.feed("", "a") == ("", False)
    assert matcher.feed("", "a") == ("", False)
    assert matcher.feed("x", "a") == ("x", False)
    assert matcher.feed("", "yaa") == ("y", True)


def test_one_string_stands_for_itself() -> None:
    assert StopText("ab").feed("xab") == ("x", True)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], [None]])
def test_bad_stop_is_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="must be a non-empty string"):
        StopText(stops)


def test_long_stops_cost_no_more_than_short_ones() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopText([stop])
    shown = "".join(matcher.feed("a")[0] for _ in range(40_000))
    assert len(shown) == 20_000
    assert matcher.feed("b") == ("", True)


def byte_tokens() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "▁x": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def generate(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, int]:
    """The loop a generator runs: text, and how many tokens count."""
    detokenizer, matcher = Detokenizer(tokenizer), StopText(stops)
    shown = ""
    for count, token in enumerate(ids, start=1):
        text, stopped = matcher.feed(detokenizer.push([token]), detokenizer.pending)
        shown += text
        if stopped:
            return shown, count
    text, _ = matcher.feed(detokenizer.finish())
    return shown + text + matcher.flush(), len(ids)


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [("。", "é", 5), ("é", "", 2), ("。🎉", "é", 9), (" x", "é。🎉", 10), ("q", "é。🎉 x", 10)],
)
def test_stops_at_the_byte_token_that_completes_it(stop: str, text: str, count: int) -> None:
    ids = [*"é。🎉".encode(), 257]
    assert generate(byte_tokens(), ids, [stop]) == (text, count)


@given(
    st.lists(st.sampled_from([*"é。x".encode(), 0xFF, 257]), max_size=14),
    st.lists(st.text("é。x ", min_size=1, max_size=3), max_size=3),
)
def test_byte_tokens_equal_decoding_every_prefix(ids: list[int], stops: list[str]) -> None:
    tokenizer = byte_tokens()
    expected = (tokenizer.decode(ids), len(ids))
    for count in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[:count])
        # Text beside broken bytes is no text a user could have meant: it may yet change.
        starts = [prefix.find(stop) for stop in stops if stop in prefix]
        if starts and "\ufffd" not in prefix:
            expected = (prefix[: min(starts)], count)
            break
    if "\ufffd" not in tokenizer.decode(ids):
        assert generate(tokenizer, ids, stops) == expected
