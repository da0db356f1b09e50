"""Where a committed block ends: end-of-sequence tokens, the token budget, and stop strings.

A round commits several tokens at once, so any of the three may fall in the middle of a block.
Whoever generates asks in this order: `cut` for what token ids alone decide, then `StopText` for the
tokens that are left, one call per token, and drops the tokens after the one that completed a stop
string.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias

from pspec.errors import RequestError

FinishReason: TypeAlias = Literal["stop", "length"]


def cut(
    ids: Sequence[int], eos: Collection[int], budget: int
) -> tuple[list[int], FinishReason | None]:
    """Cut a committed block at its first end-of-sequence token or at the budget.

    An end-of-sequence token is kept: it is the last of the token ids and is counted as a completion
    token. Its text is not shown, whatever the tokenizer says about it, so it must not reach the
    detokenizer: when the reason is `"stop"`, feed the detokenizer all the kept tokens but the last.

    Args:
        ids: Tokens of the block, in order.
        eos: Ids that end the sequence. Pass a set.
        budget: Tokens the request may still produce, this block included.

    Returns:
        The tokens to keep, and why the request is finished: `"stop"` for an end-of-sequence token
        (also when it uses up the budget), `"length"` when the budget is used up, `None` when
        generation goes on.
    """
    if budget < 0:
        raise ValueError(f"budget {budget} is negative: an earlier block was not cut")
    kept = [int(token) for token in ids[:budget]]
    for count, token in enumerate(kept, start=1):
        if token in eos:
            return kept[:count], "stop"
    return kept, "length" if len(kept) == budget else None


class StopText:
    """Finds stop strings in text that arrives token by token, and withholds what might begin one.

    Call `feed` once per token with the text that token produced. The call that returns `True`
    belongs to the token that completed the match: that token is the last one to count, in the ids
    as in the usage, while the text ends right before the stop string. At the end of the sequence
    feed what the detokenizer still held, then call `flush`.

    Where several stops are completed by the same token, the one that starts first in the text wins.
    A call costs the length of its text times the number of stops, however long the stops are. A
    stop is looked for in the text that is shown: the text of a special token is not.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare a matcher for one sequence.

        Args:
            stops: Strings that end the text; one string stands for itself, none means that nothing
                is withheld.

        Raises:
            RequestError: A stop is empty, or is not a string.
        """
        stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop string {stop!r} must be a non-empty string")
        self._patterns = [_Pattern(stop) for stop in dict.fromkeys(stops)]
        self._states = [0] * len(self._patterns)
        self._held = ""
        self._stopped = False

    def feed(self, piece: str, pending: str = "") -> tuple[str, bool]:
        """Take the text of one token.

        Args:
            piece: Text the token added; may be empty.
            pending: `Detokenizer.pending` after the token: text that is withheld only because later
                tokens might change it. A stop string that is complete there stops too, since
                cutting here makes it final.

        Returns:
            Text that can be shown now, and whether a stop string was completed. After that nothing
            is released.
        """
        if self._stopped:
            return "", True
        text = self._held + piece
        start = self._find(piece, len(self._held), self._states)
        if start is None and pending:
            start = self._find(pending, len(text), list(self._states))
            text += pending if start is not None else ""
        if start is not None:
            self._stopped, self._held = True, ""
            return text[:start], True
        # A state is the length of the longest stop prefix the text ends with: exactly what must be
        # kept back.
        keep = len(text) - max(self._states, default=0)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """Return the withheld text once no more can follow; empty after a match."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._patterns)
        return held

    def _find(self, piece: str, offset: int, states: list[int]) -> int | None:
        """Advance `states` over `piece`, which begins at `offset`; the first start of a match."""
        starts = []
        for which, pattern in enumerate(self._patterns):
            states[which], end = pattern.advance(states[which], piece)
            if end is not None:
                starts.append(offset + end - len(pattern.text))
        return min(starts, default=None)


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton."""

    def __init__(self, text: str) -> None:
        self.text = text
        # borders[n]: length of the longest proper prefix of text[:n] that is also its suffix
        self._borders = [0, 0]
        for count in range(1, len(text)):
            self._borders.append(self._step(self._borders[count], text[count]))

    def advance(self, state: int, piece: str) -> tuple[int, int | None]:
        """Read `piece`; the new state, and the end of the first match in the piece."""
        for index, char in enumerate(piece):
            state = self._step(state, char)
            if state == len(self.text):
                return state, index + 1
        return state, None

    def _step(self, state: int, char: str) -> int:
        while state and self.text[state] != char:
            state = self._borders[state]
        return state + (self.text[state] == char)
