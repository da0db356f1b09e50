r"""Token ids to text, a few tokens at a time.

The pieces add up to what `tokenizer.decode(all_ids, skip_special_tokens=True)` returns, for any way
of cutting the ids. Decoding each token alone is wrong in three ways that this class takes care of:

* a character may span tokens (byte-level BPE), so an incomplete one is withheld;
* the first token of a text is treated apart (Metaspace and Strip drop its space), so a window of
  tokens already shown is decoded again in front of the new ones;
* with byte fallback a run of `<0xNN>` tokens is decoded as a whole: one bad byte at its end turns
  all of it into `\ufffd`. Nothing of a run is final before the run is over.

`tokenizers.decoders.DecodeStream` was tried and does the first two only: with byte fallback it
shows `€` where the whole decodes to `����` (tokenizers 0.23), it cannot be asked for what is left
at the end, and a run of broken bytes makes it hold, and decode again, an ever longer window.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from tokenizers import Tokenizer

_BAD: Final = "\ufffd"
_BYTE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_ID: Final = 2**32 - 1
# An incomplete UTF-8 sequence has at most three bytes, so at most three tokens; one more stands in
# for the first token of the text. The rest is margin for decoders that look further back.
_CONTEXT: Final = 6


class Detokenizer:
    """Turns one sequence of token ids into text as the ids arrive.

    Special tokens and ids the tokenizer does not know (a model's vocabulary may be padded) have no
    text and do not touch the text around them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start an empty sequence.

        Args:
            tokenizer: Shared between sequences; it is only read.
        """
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        decoder = tokenizer.decoder
        self._fallback = decoder is not None and decoder.decode(["<0x41>"]) == "A"
        self._window: list[int] = []  # some tokens already shown, then those not shown to the end
        self._run: list[int] = []  # byte tokens after the window, of a run that is not over
        self._shown = 0  # characters of the decoded window already returned

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens.

        Args:
            ids: Any number of token ids, in order.

        Returns:
            Text that no later token can change; may be empty.
        """
        settled = False
        for token in ids:
            name = self._name(int(token))
            if name is None:
                continue
            self._run.append(int(token))
            if not (self._fallback and _BYTE.fullmatch(name)):
                self._window += self._run
                self._run = []
                settled = True
        return self._release() if settled else ""

    @property
    def pending(self) -> str:
        """Text `finish` would add now, where it is whole characters; they may still change.

        Only byte fallback has such text. `StopText` needs it to stop at the very token that
        completes a stop string. Costs one decode of the current run of byte tokens, otherwise
        nothing.
        """
        if not self._run:
            return ""
        rest = self._rest()
        return "" if _BAD in rest else rest

    def finish(self) -> str:
        """Return the text still withheld, an incomplete character as U+FFFD, and start over."""
        rest = self._rest()
        self._window, self._run, self._shown = [], [], 0
        return rest

    def _name(self, token: int) -> str | None:
        """The vocabulary entry, or None where `decode` would pass over the token."""
        if token in self._special or not 0 <= token <= _MAX_ID:
            return None
        return self._tokenizer.id_to_token(token)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _rest(self) -> str:
        return self._decode(self._window + self._run)[self._shown :]

    def _release(self) -> str:
        text = self._decode(self._window)
        # Bytes at the end that may yet become a character decode to one mark, never to more.
        end = len(text) - text.endswith(_BAD)
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) > 2 * _CONTEXT:
            # A shorter window decodes differently at its start only, so count from the end.
            withheld = len(text) - self._shown
            self._window = self._window[-_CONTEXT:]
            self._shown = len(self._decode(self._window)) - withheld
        return piece
