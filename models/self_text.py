"""Text that a target writes itself, for calibration where no data set is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pspec.models.decoder import Decoder, TargetGraph
from pspec.models.graph import run_graph

_SENTINEL = "\N{WHITE SQUARE}"


def find_opening(render: Callable[[str], list[int]], fallback: Sequence[int]) -> list[int]:
    """Token ids of a chat up to where the user speaks, which a target goes on to write itself.

    Args:
        render: a chat of one user message to token ids.
        fallback: used where two messages share no beginning.
    """
    first, second = render(f"{_SENTINEL} a"), render("b")
    same = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        same += 1
    return first[:same] or list(fallback)


@torch.inference_mode()
def write_text(
    decoder: Decoder,
    opening: Sequence[int],
    *,
    rows: int,
    length: int,
    seed: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Sample ``[rows, length]`` int32 at temperature 1, each row from the same opening.

    A row does not stop at an end-of-sequence token: what a target writes after one is its next
    turn.
    """
    model = TargetGraph(decoder, positions=length)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, length, dtype=torch.int32)
    start = min(len(opening), length - 1)
    ids[:, :start] = torch.tensor(opening[:start], dtype=torch.int32)
    cache = _empty_cache(model, rows, length)
    done = 0
    for stop in range(start, length):
        outputs = run_graph(model, _chain_feeds(ids[:, done:stop], done) | cache)
        for name, past in cache.items():
            past[:, :, done:stop] = outputs[name.replace("past", "new")]
        chances = torch.softmax(outputs["logits"][:, 0], dim=-1)
        ids[:, stop] = torch.multinomial(chances, 1, generator=generator)[:, 0].int()
        done = stop
        advance(stop)
    return ids


def read_feeds(model: TargetGraph, ids: Tensor, logit_rows: Tensor) -> dict[str, Tensor]:
    """Inputs that read ``ids [rows, length]`` in one call; ``logit_rows [R]`` are wanted."""
    rows = ids.shape[0]
    feeds = _chain_feeds(ids, 0) | _empty_cache(model, rows, 1)
    return feeds | {"logit_rows": logit_rows.int().expand(rows, -1)}


def _chain_feeds(ids: Tensor, start: int) -> dict[str, Tensor]:
    rows, count = ids.shape
    positions = torch.arange(start, start + count, dtype=torch.int32)
    return {
        "token_ids": ids,
        "position_ids": positions.expand(rows, -1),
        "tree_mask": torch.ones(count, count).tril().bool().expand(rows, -1, -1),
        "cache_length": torch.full((rows,), start, dtype=torch.int32),
        "logit_rows": torch.full((rows, 1), count - 1, dtype=torch.int32),
    }


def _empty_cache(model: TargetGraph, rows: int, slots: int) -> dict[str, Tensor]:
    sizes = {"batch": rows, "slots": slots}
    return {
        value.name: torch.zeros(
            [dim if isinstance(dim, int) else sizes[dim] for dim in value.shape]
        )
        for value in model.inputs
        if value.name.startswith("past_")
    }
