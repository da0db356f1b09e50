"""Drafters with known rounds: what they must commit is computed here, without the runtime."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from bundles import TinyBundle
from crafted_bundle import (
    NODES,
    SLOTS,
    VOCAB_SIZE,
    CraftedBundle,
    answer,
    successor,
)
from pspec.models.crafted import (
    LEADING,
    Kind,
    permutation_target,
    proposal_table,
    table_config,
    table_drafter,
)
from pspec.models.drafter_graph import DrafterGraph
from pspec.models.graph import run_graph
from pspec.runtime.bundle import open_bundle
from pspec.runtime.decode import Decoding, Stats, TreeSettings
from pspec.runtime.drafter import Drafter
from pspec.runtime.generate import DraftMode, GenerationConfig, Generator
from pspec.runtime.replay import ReplayDrafter
from pspec.runtime.tree import TreePlan

COUNT = 43
"""Tokens asked for: prefill yields one, and full oracle rounds leave two for the last."""


@dataclass(frozen=True)
class Run:
    """One sequence: lengths of the blocks that rounds committed, and all tokens."""

    tokens: list[int]
    rounds: list[int]
    stats: Stats


def collect(decoding: Decoding, prompt: Sequence[int], count: int = COUNT) -> Run:
    """Decode to the end of the budget."""
    first, *blocks = (block.tokens for block in decoding.run(prompt, count))
    tokens = list(itertools.chain(first, *blocks))
    assert decoding.stats.committed == len(tokens) - len(first)
    assert decoding.stats.rounds == len(blocks)
    return Run(tokens, [len(block) for block in blocks], decoding.stats)


def settings(nodes: int | None = None, draft: DraftMode = "bundle") -> GenerationConfig:
    """Greedy, no end-of-sequence token."""
    return GenerationConfig(eos_token_id=(), nodes=nodes, draft=draft)


def predict(
    probabilities: Sequence[float], right: int, slots: int, nodes: int, count: int
) -> list[int]:
    """Round lengths where every slot ranks the right token at ``right`` (from 0).

    All paths of ranks are listed and the likeliest kept, which is what a tree under a node budget
    should hold; no tree is built.
    """
    rounds, left = [], count - 1
    while left:
        depth = min(slots, left - 1)
        paths = [
            path
            for length in range(1, depth + 1)
            for path in itertools.product(range(len(probabilities)), repeat=length)
        ]
        paths.sort(key=lambda path: -torch.tensor([probabilities[r] for r in path]).log().sum())
        kept = set(paths[: nodes - 1])
        accepted = max((n for n in range(1, depth + 1) if (right,) * n in kept), default=0)
        rounds.append(accepted + 1)
        left -= accepted + 1
    return rounds


@pytest.fixture(scope="module", params=["crafted", "crafted_shifted"])
def bundle(request: pytest.FixtureRequest) -> CraftedBundle:
    result: CraftedBundle = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="module")
def generator(bundle: CraftedBundle) -> Generator:
    return Generator(open_bundle(bundle.folder))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("kind", LEADING)
def test_a_table_drafter_says_its_table(kind: Kind, shift: bool) -> None:
    # In PyTorch and over long contexts: attention must find the last token among all others.
    table = proposal_table(kind, successor(), SLOTS)
    config = table_config(SLOTS, VOCAB_SIZE, VOCAB_SIZE, shift=shift)
    target = permutation_target(successor())
    graph = DrafterGraph(table_drafter(config, table), target, positions=1100)
    past = torch.zeros(1, 1, 1, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 2, 9, 1000):
        ids = torch.randint(VOCAB_SIZE, (1, count + 3), generator=generator, dtype=torch.int32)
        feeds = {
            "token_ids": ids,  # three more than count
            "token_count": torch.tensor([count], dtype=torch.int32),
            "cache_length": torch.zeros(1, dtype=torch.int32),
            "feature": torch.randn(1, count + 3, VOCAB_SIZE, generator=generator),
            "past_key.0": past,
            "past_value.0": past,
        }
        got = run_graph(graph, feeds)
        logprobs, best = table[:, int(ids[0, count - 1])].topk(16)
        assert torch.equal(got["draft_ids"][0].long(), best)
        torch.testing.assert_close(got["draft_logprobs"][0], logprobs, rtol=0, atol=1e-5)


def test_kinds_are_what_they_are_called() -> None:
    after, tokens = successor(), torch.arange(VOCAB_SIZE)
    tables = {kind: proposal_table(kind, after, SLOTS) for kind in LEADING}
    right = tokens
    for slot in range(SLOTS):
        right = after[right]
        ranks = {kind: table[slot].argsort(descending=True) for kind, table in tables.items()}
        assert torch.equal(ranks["oracle"][:, 0], right)
        assert torch.equal(ranks["second-best"][:, 1], right)
        assert not (ranks["anti-oracle"][:, :16] == right[:, None]).any()
        assert (ranks["constant"] == tokens).all()
    for table in tables.values():
        torch.testing.assert_close(table.exp().sum(-1), torch.ones(SLOTS, VOCAB_SIZE))


@pytest.mark.parametrize("kind", LEADING)
@pytest.mark.parametrize("length", [1, 2, 3, 20, 50])
@pytest.mark.parametrize("draft", ["off", "lookup", "bundle"])
def test_answers_are_the_permutation(
    bundle: CraftedBundle, generator: Generator, kind: Kind, length: int, draft: DraftMode
) -> None:
    prompt = bundle.prompt(kind, length)
    decoding = generator.decode(settings(draft=draft))
    assert collect(decoding, prompt).tokens == answer(prompt, COUNT)


@pytest.mark.parametrize("nodes", range(2, NODES + 1))
def test_an_oracle_fills_every_round(
    bundle: CraftedBundle, generator: Generator, nodes: int
) -> None:
    for length in (1, 8, 50):
        prompt = bundle.prompt("oracle", length)
        run = collect(generator.decode(settings(nodes)), prompt)
        full = min(SLOTS, nodes - 1) + 1
        assert run.tokens == answer(prompt, COUNT)
        assert set(run.rounds[:-1]) == {full}
        assert run.rounds[-1] == (COUNT - 1) % full or full
        assert run.stats.accepted_by_slot == [
            sum(committed - 1 > slot for committed in run.rounds) for slot in range(SLOTS)
        ]


@pytest.mark.parametrize("nodes", [2, 5, 8, NODES])
def test_an_anti_oracle_never_gains(
    bundle: CraftedBundle, generator: Generator, nodes: int
) -> None:
    prompt = bundle.prompt("anti-oracle", 8)
    run = collect(generator.decode(settings(nodes)), prompt)
    assert run.tokens == answer(prompt, COUNT)
    assert run.stats.tau == 1.0
    assert run.stats.rounds == COUNT - 1
    assert run.stats.accepted == 0
    assert run.stats.accepted_by_slot == [0] * SLOTS
    # Every round but the last, which has no room for a draft, fills its tree.
    assert run.stats.drafted == (COUNT - 2) * (nodes - 1)


@pytest.mark.parametrize("nodes", range(2, NODES + 1))
def test_a_second_best_drafter_gains_what_its_tree_holds(
    bundle: CraftedBundle, generator: Generator, nodes: int
) -> None:
    prompt = bundle.prompt("second-best", 8)
    probabilities = bundle.table[0, prompt[-1]].exp().sort(descending=True).values[:5].tolist()
    assert probabilities[:2] == pytest.approx([0.5, 0.4])
    run = collect(generator.decode(settings(nodes)), prompt)
    assert run.tokens == answer(prompt, COUNT)
    assert run.rounds == predict(probabilities, 1, SLOTS, nodes, COUNT)
    levels = [run.stats.accepted_by_slot[slot] > 0 for slot in range(SLOTS)]
    # 0.4 is the second likeliest path, 0.16 the sixth, 0.064 the fourteenth.
    assert levels == [nodes > 2, nodes > 6, nodes > 14, False]


def test_a_second_best_drafter_as_a_chain_never_gains(
    bundle: CraftedBundle, generator: Generator
) -> None:
    prompt = bundle.prompt("second-best", 8)
    chain = TreePlan(tuple(range(SLOTS)), (0,) * SLOTS)
    decoding = generator.decode(settings())
    decoding.tree = TreeSettings(NODES, chain)
    run = collect(decoding, prompt)
    assert run.tokens == answer(prompt, COUNT)
    assert run.stats.tau == 1.0
    assert run.stats.drafted > COUNT


def test_a_planned_tree_finds_the_second_best(bundle: CraftedBundle, generator: Generator) -> None:
    # The right path comes last in the plan, behind a branch of wrong ones.
    plan = TreePlan((0, 1, 0, 3, 4), (0, 0, 1, 1, 1))
    prompt = bundle.prompt("second-best", 8)
    decoding = generator.decode(settings())
    decoding.tree = TreeSettings(NODES, plan)
    run = collect(decoding, prompt)
    assert run.tokens == answer(prompt, COUNT)
    assert set(run.rounds[:-1]) == {4}


def test_a_constant_drafter_is_right_now_and_then(
    bundle: CraftedBundle, generator: Generator
) -> None:
    prompt = bundle.prompt("constant", 8)
    run = collect(generator.decode(settings(2)), prompt)
    expected = answer(prompt, COUNT)
    assert run.tokens == expected
    # One drafted token, always 0: accepted where 0 comes next and a bonus fits behind it.
    accepted = sum(token == 0 for token in expected[1:-1])
    assert run.stats.accepted == accepted > 0
    assert run.stats.committed == run.stats.rounds + accepted


def replayed(
    bundle: TinyBundle, kind: Kind, nodes: int, plan: TreePlan | None = None
) -> tuple[Run, Run]:
    """Plain decoding of a random model, and the same beside a drafter that replays it."""
    generator = Generator(open_bundle(bundle.folder))
    prompt = [17, 250, 3, 99]
    plain = collect(generator.decode(settings(draft="off")), prompt)
    assert len(set(plain.tokens)) > 10
    assert plain.stats.tau == 1.0
    vocab = generator.bundle.manifest.target.vocab_size
    assert kind != "constant"
    drafter: Drafter = ReplayDrafter(kind, [*prompt, *plain.tokens], SLOTS, vocab)
    decoding = generator.decode(settings(nodes), drafter)
    decoding.tree = TreeSettings(nodes, plan)
    return plain, collect(decoding, prompt)


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_replayed_oracle(llama_bundle: TinyBundle, nodes: int) -> None:
    plain, run = replayed(llama_bundle, "oracle", nodes)
    full = min(SLOTS, nodes - 1) + 1
    assert run.tokens == plain.tokens
    assert set(run.rounds[:-1]) == {full}


@pytest.mark.parametrize("nodes", [2, 8])
def test_replayed_anti_oracle(llama_bundle: TinyBundle, nodes: int) -> None:
    plain, run = replayed(llama_bundle, "anti-oracle", nodes)
    assert run.tokens == plain.tokens
    assert run.stats.tau == 1.0
    assert run.stats.accepted == 0
    assert run.stats.drafted > COUNT - 3


@pytest.mark.parametrize("nodes", range(2, 9))
def test_replayed_second_best(llama_bundle: TinyBundle, nodes: int) -> None:
    plain, run = replayed(llama_bundle, "second-best", nodes)
    assert run.tokens == plain.tokens
    assert run.rounds == predict((0.6, 0.4), 1, SLOTS, nodes, COUNT)
    assert (run.stats.tau > 1) == (nodes > 2)


def test_replayed_second_best_as_a_chain(llama_bundle: TinyBundle) -> None:
    chain = TreePlan(tuple(range(SLOTS)), (0,) * SLOTS)
    plain, run = replayed(llama_bundle, "second-best", 8, chain)
    assert run.tokens == plain.tokens
    assert run.stats.tau == 1.0
