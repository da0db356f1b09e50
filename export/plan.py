"""The shape plan: which static graphs a bundle holds, and what it refuses to plan."""

from __future__ import annotations

from pspec.errors import ConfigError
from pspec.runtime.manifest import ShapePlan

SMALLEST_BUCKET = 256
"""A shorter context gets one bucket of its own size."""
MAX_NODES = 256


def make_plan(
    *, max_context: int, nodes: int, batch: int, slots: int, limit: int, chunk: int = 64
) -> ShapePlan:
    """Shapes for one target and drafter.

    Args:
        max_context: longest prompt and answer together, in tokens.
        nodes: tree nodes of a verify call, node 0 included.
        batch: rows of every graph.
        slots: K of the drafter; prompt lookup counts its longest continuation.
        limit: longest context the target was made for.
        chunk: tokens of a prefill call.

    Raises:
        ConfigError: naming the setting and its range.
    """
    if not 2 <= max_context <= limit:
        raise ConfigError(f"--max-context {max_context} is not in 2..{limit}, the target's range")
    if not 1 <= nodes <= MAX_NODES:
        raise ConfigError(f"--nodes {nodes} is not in 1..{MAX_NODES}")
    if not 1 <= batch <= 64:
        raise ConfigError(f"--batch {batch} is not in 1..64")
    buckets = []
    bucket = SMALLEST_BUCKET
    while bucket < max_context:
        buckets.append(bucket)
        bucket *= 2
    depth = min(slots, nodes - 1)
    return ShapePlan(batch, nodes, depth + 1, chunk, (*buckets, max_context))


def target_sizes(plan: ShapePlan) -> list[dict[str, int]]:
    """Sizes of every static target graph: plain, verify and prefill at every bucket."""
    calls = {(1, 1), (plan.nodes, plan.nodes), (plan.chunk, 1)}
    return [
        {"batch": plan.batch, "nodes": nodes, "slots": slots, "rows": rows}
        for slots in plan.buckets
        for nodes, rows in sorted(calls)
    ]


def drafter_sizes(plan: ShapePlan) -> list[dict[str, int]]:
    """Sizes of every static drafter graph: a round's accepted pairs and prefill at every bucket."""
    return [
        {"batch": plan.batch, "accepted": accepted, "slots": slots}
        for slots in plan.buckets
        for accepted in sorted({plan.accepted, plan.chunk})
    ]
