"""The target of one sequence: prompt in, trees verified, accepted rows kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pspec.runtime.engine import Binding, Engine
from pspec.runtime.manifest import ShapePlan
from pspec.runtime.tree import Tree, fill_mask

Features = NDArray[np.float32] | None


class Target:
    """Drives a target engine for batch row 0."""

    def __init__(self, engine: Engine, plan: ShapePlan) -> None:
        self.engine = engine
        self.plan = plan
        self.sequence = 0
        """Number of the sequence whose rows the cache holds."""
        self._binding: Binding | None = None

    def start(self) -> int:
        """Forget the sequence before; returns the new one's number."""
        self.engine.truncate(0, 0)
        self.sequence += 1
        return self.sequence

    def prefill(self, ids: Sequence[int]) -> Iterator[tuple[int, Features, int]]:
        """Run a prompt through the plan's chunks.

        Yields:
            Per chunk: tokens done so far, their features ``[n, F]`` (valid until the next chunk),
            and the token that follows the chunk's last one.
        """
        done = 0
        for size in chunk_sizes(len(ids), self.plan, self.engine.fit):
            part = ids[done : done + size]
            binding = self._bind(size, 1)
            inputs, count = binding.inputs, len(part)
            base = int(self.engine.lengths[0])
            inputs["token_ids"][0, :count] = part
            inputs["position_ids"][0, :] = base
            inputs["position_ids"][0, :count] += np.arange(count, dtype=np.int32)
            inputs["tree_mask"][0] = np.tri(size, dtype=np.bool_)
            inputs["logit_rows"][0, 0] = count - 1
            self.engine.run(binding, count)
            self.engine.commit(0, range(count))
            done += count
            yield done, self._features(range(count)), int(binding.outputs["next_token"][0, 0])

    def verify(self, tree: Tree) -> list[int]:
        """The target's next token at every node of ``tree``."""
        count = len(tree)
        size = self.engine.fit(count)
        binding = self._bind(size, size)
        inputs = binding.inputs
        base = int(self.engine.lengths[0])
        inputs["token_ids"][0, :count] = tree.tokens
        inputs["position_ids"][0, :] = base
        inputs["position_ids"][0, :count] += np.asarray(tree.depths, np.int32)
        fill_mask(tree, inputs["tree_mask"][0])
        inputs["logit_rows"][0] = np.arange(size)
        self.engine.run(binding, tree.depth + 1)
        tokens: list[int] = binding.outputs["next_token"][0, :count].tolist()
        return tokens

    def commit(self, path: Sequence[int]) -> Features:
        """Keep the rows of the accepted path; returns the features of its nodes ``[n, F]``."""
        self.engine.commit(0, path)
        return self._features(path)

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` rows."""
        self.engine.truncate(0, length)

    def _bind(self, size: int, rows: int) -> Binding:
        self._binding = self.engine.bind(size, rows)
        return self._binding

    def _features(self, nodes: Sequence[int]) -> Features:
        assert self._binding is not None
        feature = self._binding.outputs.get("feature")
        return None if feature is None else feature[0].take(nodes, axis=0)


_FIXED_COST = 8
"""What a call costs beside its rows, in rows: weights stream past once, however many rows."""


def chunk_sizes(tokens: int, plan: ShapePlan, fit: Callable[[int], int]) -> list[int]:
    """Shapes that carry a prompt: whole chunks, then the tail in verify-sized pieces or in one.

    The tail takes what is cheaper, so that 20 tokens do not cost a chunk of 256.

    Args:
        tokens: of the prompt.
        plan: chunk and verify sizes.
        fit: the smallest shape of the engine for a number of rows.
    """
    sizes = [plan.chunk] * (tokens // plan.chunk)
    tail = tokens % plan.chunk
    if not tail:
        return sizes
    pieces = [plan.nodes] * -(-tail // plan.nodes)
    cost = sum(_FIXED_COST + size for size in pieces)
    whole = fit(tail)
    return sizes + (pieces if cost < _FIXED_COST + whole else [whole])
