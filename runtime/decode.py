"""One sequence decoded: draft, tree, verify, accept, commit; token ids in, token ids out.

Lossless by construction: a drafted token is kept only where the target, at the same position and
over the same context, would have said it. See ``docs/how-it-works.md``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pspec.errors import RequestError
from pspec.runtime.drafter import Drafter
from pspec.runtime.node_choice import NodeBudget
from pspec.runtime.request import token_ids, whole
from pspec.runtime.stop import FinishReason, cut
from pspec.runtime.target import Target
from pspec.runtime.tree import Tree, TreePlan, accept_greedy, best_first, planned, root_only


@dataclass
class Stats:
    """What the rounds of one generation did; the token that prefill yields belongs to no round."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    accepted_by_slot: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Tokens committed per round, the bonus included; plain decoding is exactly 1."""
        return self.committed / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class Block:
    """Tokens committed together.

    Attributes:
        tokens: the tokens, cut at the first end-of-sequence token or at the budget.
        accepted: how many of them were drafted.
        finish_reason: why this block is the last one, or None.
    """

    tokens: list[int]
    accepted: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class TreeSettings:
    """How trees are built: at most ``nodes`` nodes, best-first or by a plan.

    ``budget`` says which part of such a tree is verified.
    """

    nodes: int
    plan: TreePlan | None = None
    budget: NodeBudget = field(default_factory=NodeBudget)


class Decoding:
    """State of one sequence: its ``ids``, prompt and answer, and the ``stats`` of its rounds."""

    ids: list[int]
    stats: Stats

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tree: TreeSettings,
        eos: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.eos = eos
        self.vocab_size = vocab_size
        self._reset()

    def run(self, prompt: Iterable[int], max_new_tokens: int) -> Iterator[Block]:
        """Prefill ``prompt`` and yield committed blocks until the sequence ends.

        Each run is a new sequence: ``ids`` and ``stats`` begin anew.

        Raises:
            RequestError: for a prompt that is empty, holds what is no token id, or leaves no room
                for an answer, and when another sequence was begun on the same engine meanwhile.
        """
        prompt = token_ids(prompt, self.vocab_size)
        limit = self._limit(len(prompt), max_new_tokens)
        self._reset()
        if max_new_tokens == 0:
            return
        sequence = self.target.start()
        block = self._prefill(prompt, limit)
        yield block
        while block.finish_reason is None:
            if self.target.sequence != sequence:
                raise RequestError("another generation took the engine over: finish one at a time")
            block = self._round(limit)
            yield block

    def _round(self, limit: int) -> Block:
        """Draft, tree, verify, accept, commit; the sequence never grows beyond ``limit`` tokens."""
        start, engines = time.perf_counter(), self._engine_seconds()
        tree = self._draft_tree(limit - len(self.ids))
        wanted = self.target.verify(tree)
        path, bonus = accept_greedy(tree, wanted)
        self.tree.budget.observe(tree, path, bonus)
        block = self._cut([*(tree.tokens[node] for node in path[1:]), bonus], limit)
        path = path[: len(block.tokens)]
        features = self.target.commit(path)
        self.ids += block.tokens
        if self.drafter is not None:
            self.drafter.observe(block.tokens, features)
        self._record(tree, block, time.perf_counter() - start, engines)
        return block

    def _draft_tree(self, room: int) -> Tree:
        """A tree whose deepest path and bonus fit in ``room`` tokens; plain where nothing fits."""
        root, depth, cached = self.ids[-1], room - 1, len(self.ids) - 1
        nodes, plan, budget = self.tree.nodes, self.tree.plan, self.tree.budget
        if self.drafter is None or depth < 1 or nodes < 2 or not budget.drafts(cached):
            return root_only(root)
        proposal = self.drafter.propose()
        if proposal is None:
            return root_only(root)
        if plan is not None:
            tree = planned(root, proposal, plan, nodes, depth)
        else:
            tree = best_first(root, proposal, nodes, depth)
        return budget.cut(tree, proposal.match, cached)

    def _prefill(self, prompt: Sequence[int], limit: int) -> Block:
        start = time.perf_counter()
        self.ids = list(prompt)
        if self.drafter is not None:
            self.drafter.start(prompt[0])
        done = 0
        for stop, features, token in self.target.prefill(prompt):
            # Feature t goes with token t + 1; the last one's is what prefill yields.
            following = [*prompt[done + 1 : stop + 1]]
            if stop == len(prompt):
                following.append(token)
            if self.drafter is not None:
                self.drafter.observe(following, features)
            done = stop
        block = self._cut([token], limit)
        self.ids += block.tokens
        self.stats.prefill_seconds += time.perf_counter() - start
        return block

    def retract(self, block: Block, kept: int) -> None:
        """Keep the first ``kept`` tokens of the last block: a stop string was completed there."""
        dropped = len(block.tokens) - kept
        if not dropped:
            return
        del self.ids[-dropped:]
        self.target.truncate(len(self.ids) - 1)
        if self.drafter is not None:
            self.drafter.truncate(len(self.ids))
        self.stats.committed -= dropped
        self.stats.accepted -= max(block.accepted - kept, 0)
        for slot in range(kept, block.accepted):
            self.stats.accepted_by_slot[slot] -= 1

    def _cut(self, tokens: list[int], limit: int) -> Block:
        kept, reason = cut(tokens, self.eos, limit - len(self.ids))
        return Block(kept, min(len(kept), len(tokens) - 1), reason)

    def _reset(self) -> None:
        self.ids = []
        self.stats = Stats(accepted_by_slot=[0] * (self.drafter.slots if self.drafter else 0))

    def _limit(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Longest sequence allowed."""
        context = self.target.plan.max_context
        whole("max_new_tokens", max_new_tokens, 0)
        if not prompt_tokens:
            raise RequestError("the prompt is empty: it needs at least one token")
        if prompt_tokens >= context:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, the context holds {context}: "
                f"use at most {context - 1}, or export with a larger --max-context"
            )
        return min(prompt_tokens + max_new_tokens, context)

    def _engine_seconds(self) -> tuple[float, float]:
        return self.drafter.seconds if self.drafter else 0.0, self.target.engine.seconds

    def _record(
        self, tree: Tree, block: Block, seconds: float, before: tuple[float, float]
    ) -> None:
        stats, after = self.stats, self._engine_seconds()
        draft, verify = after[0] - before[0], after[1] - before[1]
        stats.rounds += 1
        stats.drafted += len(tree) - 1
        stats.accepted += block.accepted
        stats.committed += len(block.tokens)
        for slot in range(block.accepted):
            stats.accepted_by_slot[slot] += 1
        stats.draft_seconds += draft
        stats.verify_seconds += verify
        stats.host_seconds += seconds - draft - verify
