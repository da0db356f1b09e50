from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pspec.runtime.lookup import PromptLookup


def begun(tokens: list[int], slots: int = 4, longest: int = 3) -> PromptLookup:
    lookup = PromptLookup(slots, longest)
    lookup.start(tokens[0])
    lookup.observe(tokens[1:], None)
    return lookup


def proposed(lookup: PromptLookup) -> list[int] | None:
    proposal = lookup.propose()
    if proposal is None:
        return None
    assert proposal.ids.shape == proposal.logprobs.shape == (len(proposal.ids), 1)
    assert (proposal.logprobs == 0).all()  # a chain: nothing competes with it
    tokens: list[int] = proposal.ids[:, 0].tolist()
    return tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1], None),
        ([1, 2, 3], None),
        ([1, 1], [1]),
        ([1, 2, 1], [2, 1]),
        ([5, 1, 6, 5, 2, 7, 5], [2, 7, 5]),  # the most recent occurrence
        ([1, 2, 8, 3, 2, 9, 1, 2], [8, 3, 2, 9]),  # the longer n-gram, though it is further back
        ([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], [8, 2, 3, 9]),
        ([4, 1, 2, 3, 8, 5, 1, 2, 3, 9, 4, 1, 2, 3], [9, 4, 1, 2]),  # three tokens, not four
        ([7, 7, 7, 7], [7]),  # an occurrence may overlap the end
        ([1, 2, 3, 4, 5, 6, 7, 1], [2, 3, 4, 5]),  # cut at the slots
    ],
)
def test_proposals(tokens: list[int], expected: list[int] | None) -> None:
    assert proposed(begun(tokens)) == expected


def searched(tokens: list[int], slots: int, longest: int) -> list[int] | None:
    """The definition: scan backwards for the longest suffix that occurred before."""
    for size in range(min(longest, len(tokens)), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return tokens[end : end + slots]
    return None


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(TOKENS, st.integers(1, 6), st.integers(1, 4))
def test_equals_a_search(tokens: list[int], slots: int, longest: int) -> None:
    assert proposed(begun(tokens, slots, longest)) == searched(tokens, slots, longest)


@given(TOKENS, TOKENS, st.data())
def test_a_cut_sequence_goes_on_as_if_nothing_had_followed(
    tokens: list[int], more: list[int], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, len(tokens)))
    lookup = begun(tokens)
    lookup.truncate(kept)
    lookup.observe(more, None)
    assert proposed(lookup) == searched([*tokens[:kept], *more], 4, 3)


def test_a_new_sequence_remembers_nothing() -> None:
    lookup = begun([1, 2, 3, 1, 2])
    lookup.start(1)
    lookup.observe([2], None)
    assert proposed(lookup) is None


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([1, 2, 1], 1),
        ([5, 1, 2, 8, 3, 6, 1, 2], 2),
        ([9, 1, 2, 3, 4, 5, 7, 6, 1, 2, 3, 4, 5], 5),  # longer than what is looked up
        ([1, 2, 3, 4, 7, 1, 2, 3, 4], 4),  # from the first token on
        ([7, 7, 7, 7], 3),  # an occurrence may overlap the end
        ([*range(30), *range(30)], 16),  # counted so far
    ],
)
def test_the_length_of_a_match_is_told(tokens: list[int], match: int) -> None:
    proposal = begun(tokens).propose()
    assert proposal is not None
    assert proposal.match == match
