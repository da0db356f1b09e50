from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pspec.runtime.detokenizer import Detokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, déjà vu; emoji 🎉 😀 👩‍💻 and more",
    "日本語のテキストと한국어 and 中文",
    "  two  spaces   three\n\tand tabs",
]
SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("日 é", special=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: `▁` for spaces, one stripped from the front, bytes for what is unknown."""
    words = ["▁", "▁the", "▁fox", "fo", "x", "é", "\ufffd", "▁▁"]
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: index for index, name in enumerate(names)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_suffix() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


MAKERS = {
    maker.__name__: lru_cache(maker)
    for maker in (byte_level, metaspace, byte_fallback, word_suffix, no_decoder)
}
every_kind = pytest.mark.parametrize("kind", list(MAKERS))


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def pieces(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def singly(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return pieces(tokenizer, [[token] for token in ids])


@every_kind
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = MAKERS[kind]()
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 9), max_size=60))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=20)))
    chunks = [ids[start:end] for start, end in pairwise([0, *cuts, len(ids)])]
    assert "".join(pieces(tokenizer, chunks)) == whole(tokenizer, ids)
    assert "".join(singly(tokenizer, ids)) == whole(tokenizer, ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=40), text=st.text(max_size=12))
def test_any_bytes(kind: str, raw: bytes, text: str) -> None:
    """Mostly broken UTF-8, and whole characters cut into bytes."""
    tokenizer = MAKERS[kind]()
    ids = [byte_id(tokenizer, byte) for byte in raw + text.encode() + raw[::-1]]
    assert "".join(singly(tokenizer, ids)) == whole(tokenizer, ids)


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    token = tokenizer.token_to_id(f"<0x{byte:02X}>")
    if token is None:  # byte level: printable Latin-1 stands for itself, the others are moved up
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        moved = [other for other in range(256) if other not in kept]
        token = tokenizer.token_to_id(chr(byte if byte in kept else 256 + moved.index(byte)))
    assert token is not None
    return token


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("line", LINES)
def test_text_comes_back(kind: str, line: str) -> None:
    tokenizer = MAKERS[kind]()
    ids = tokenizer.encode(line).ids
    assert "".join(singly(tokenizer, ids)) == whole(tokenizer, ids)
    if kind == "byte_level":
        assert whole(tokenizer, ids) == line


def test_incomplete_characters_are_withheld() -> None:
    tokenizer = MAKERS["byte_level"]()
    ids = [byte_id(tokenizer, byte) for byte in "a😀b".encode()]
    assert singly(tokenizer, ids) == ["a", "", "", "", "😀", "b", ""]
    assert singly(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


def test_broken_bytes_do_not_hold_up_the_text() -> None:
    tokenizer = MAKERS["byte_level"]()
    parts = singly(tokenizer, [byte_id(tokenizer, 0xFF)] * 20)
    assert parts == ["", *["\ufffd"] * 20]


def test_spaces_are_neither_lost_nor_doubled() -> None:
    tokenizer = MAKERS["byte_fallback"]()
    ids = [tokenizer.token_to_id(name) or 0 for name in ("▁the", "▁", "▁fox", "▁▁", "x")]
    assert singly(tokenizer, ids) == ["the", " ", " fox", "  ", "x", ""]
    assert singly(tokenizer, [1, *ids[:2]]) == ["", "the", " ", ""]  # a special token in front


def test_a_run_of_byte_tokens_is_final_only_at_its_end() -> None:
    tokenizer = MAKERS["byte_fallback"]()
    euro = [byte_id(tokenizer, byte) for byte in "€".encode()]
    word = tokenizer.token_to_id("x") or 0
    assert singly(tokenizer, [*euro, word]) == ["", "", "", "€x", ""]
    assert singly(tokenizer, euro) == ["", "", "", "€"]
    assert singly(tokenizer, [*euro, byte_id(tokenizer, 0xFF)])[-1] == "\ufffd" * 4


def test_pending_is_the_whole_characters_of_a_run() -> None:
    tokenizer = MAKERS["byte_fallback"]()
    detokenizer = Detokenizer(tokenizer)
    seen = []
    for byte in "€é".encode() + b"\xff":
        assert detokenizer.push([byte_id(tokenizer, byte)]) == ""
        seen.append(detokenizer.pending)
    assert seen == ["", "", "€", "", "€é", ""]


@every_kind
def test_ids_outside_the_tokenizer_decode_to_nothing(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    ids = tokenizer.encode("a b").ids
    size = tokenizer.get_vocab_size()
    mixed = [size, *(other for token in ids for other in (token, size + 5, 2**31, 2**40, -1))]
    assert "".join(singly(tokenizer, mixed)) == whole(tokenizer, ids)


@every_kind
def test_finish_starts_over(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a b").ids
    texts = [detokenizer.push(ids) + detokenizer.finish() for _ in range(2)]
    assert texts == [whole(tokenizer, ids)] * 2
    assert detokenizer.finish() == ""


class Spy:
    """A tokenizer that records how many ids it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded.append(len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "byte_fallback"])
def test_cost_of_a_token_is_bounded(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    broken = [byte_id(tokenizer, 0x80)] if kind != "metaspace" else tokenizer.encode("fox").ids
    ids = (broken * 1000)[:1000]
    spy = Spy(tokenizer)
    text = singly(cast("Tokenizer", spy), ids)
    assert "".join(text) == whole(tokenizer, ids)
    assert sum(spy.decoded) < 20 * len(ids)
