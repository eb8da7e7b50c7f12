"""Replay equals decoding: steps, drafted, reached, kept, pass for pass."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outrider.device import Placement
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.lm import LMDrafter
from outrider.drafters.merge import MergedDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.tree import TreeShape
from outrider.errors import ConfigError
from outrider.measure.replay import refusal, shares_lengths
from outrider.models.llama import LlamaTarget
from outrider.models.native import NativeTarget
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams
from outrider.types import Proposal
from tests.drafters.heads import CPU, VOCAB, tiny_head, tiny_target
from tests.engine.support import Scripted, random_trees, table_model
from tests.engine.test_heads import CONFIG, make_head, make_target
from tests.measure.helpers import assert_same, decode, questions, replay, text_of

LENGTHS = (1, 2, 5)
SHAPE = TreeShape(depth=3, width=2, num_nodes=5)
FLOAT32 = Placement(device=CPU, precision="float32")


@pytest.fixture(scope="module")
def target() -> LlamaTarget:
    return tiny_target()


def makers(target: LlamaTarget) -> dict[str, Callable[[], Drafter]]:
    head = tiny_head(target)
    half = target.slice_layers(2)
    return {
        "ngram": NGramDrafter,
        "suffix": SuffixDrafter,
        "suffix chain": lambda: SuffixDrafter(rule="chain"),
        "suffix paper": lambda: SuffixDrafter(rule="paper", factor=2.0, offset=1.0),
        "slice": lambda: LMDrafter(half, name="slice"),
        "slice tree": lambda: LMDrafter(half, name="slice", tree=SHAPE),
        "head": lambda: EagleDrafter(head, FLOAT32),
        "head min_prob": lambda: EagleDrafter(head, FLOAT32, min_prob=0.05),
        "head tree": lambda: EagleDrafter(head, FLOAT32, tree=SHAPE),
        "merged": lambda: MergedDrafter(SuffixDrafter(), EagleDrafter(head, FLOAT32, tree=SHAPE), shape=SHAPE),
    }


@pytest.mark.parametrize("name", makers(tiny_target()))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replay_counts_what_decoding_counts(target: LlamaTarget, name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11 if temperature else None, max_tokens=20, top_p=0.95)
    assert_same(target, makers(target)[name], questions(3, params, vocab=VOCAB), LENGTHS)


@pytest.mark.parametrize("kind", ["native bfloat16", "native int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_the_native_path_every_precision_counts_alike(kind: str, temperature: float) -> None:
    target = make_target(kind)
    assert isinstance(target, NativeTarget)
    head = make_head(target, CONFIG, list(range(0, CONFIG.vocab_size, 2)))
    placement = Placement(device=CPU, precision=target.placement.precision)
    params = SamplingParams(temperature=temperature, seed=5 if temperature else None, max_tokens=16)
    asked = questions(3, params, vocab=CONFIG.vocab_size)
    for make in (
        lambda: LMDrafter(target.slice_layers(2), name="slice"),
        lambda: EagleDrafter(head, placement, context=target.context),
        lambda: EagleDrafter(head, placement, tree=SHAPE, context=target.context),
    ):
        assert_same(target, make, asked, (1, 4))


@pytest.mark.parametrize("name", ["ngram", "slice", "head", "head tree"])
def test_companions_change_nothing(target: LlamaTarget, name: str) -> None:
    assert_same(target, makers(target)[name], questions(4, SamplingParams(max_tokens=16), vocab=VOCAB), (2, 4), group=3)


@pytest.mark.parametrize("make", [NGramDrafter, SuffixDrafter, lambda: random_trees(3)])
def test_ends_are_counted_as_in_decoding(make: Callable[[], Drafter]) -> None:
    """Stops inside kept drafts, limits inside a step, outputs of one token."""
    target = table_model(1, eos=(5,), scale=2.5)
    for max_tokens in (1, 2, 3, 9, 30):
        params = SamplingParams(temperature=1.0, seed=max_tokens, max_tokens=max_tokens)
        lengths = (4,) if make not in (NGramDrafter, SuffixDrafter) else LENGTHS
        assert_same(target, make, questions(8, params, vocab=7, seed=max_tokens), lengths)


def test_penalties_and_unknown_drafters() -> None:
    """A drafter that replay has never heard of, whose shorter drafts are not the beginnings of its longer ones."""
    target = table_model(2)

    def fixed(request: object) -> Proposal:
        k = request.num_draft_tokens  # type: ignore[attr-defined]
        rng = random.Random(f"{list(request.tokens)} {k}")  # type: ignore[attr-defined]
        return Proposal.chain([rng.randrange(7) for _ in range(k)], drafter="odd")

    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=25)
    assert not shares_lengths(Scripted(fixed))
    assert_same(target, lambda: Scripted(fixed), questions(6, params, vocab=7), LENGTHS)


def test_deterministic_drafts_are_scored_on_text_drawn_without_a_seed() -> None:
    target = table_model(3, scale=2.5)
    params = SamplingParams(temperature=0.9, max_tokens=40)
    runs = decode(target, NGramDrafter(), questions(10, params, vocab=7), 4)
    texts = [text_of(run, target) for run in runs.values()]
    scores = replay(target, NGramDrafter(), texts, (4,))
    for text in texts:  # draw-and-compare jumps along the text, however it was drawn
        counts, live = scores[text.id].counts[4], runs[text.id].counts
        assert (counts.passes, counts.accepted, counts.kept) == (live.passes, live.accepted, live.kept)


def test_a_text_remembers_only_what_was_said_before_it() -> None:
    """The suffix index holds finished answers; replay must not draft an answer from itself."""
    target = table_model(4)
    asked = questions(6, SamplingParams(max_tokens=30), vocab=7)
    asked = [asked[0], *asked]  # the second request repeats the first
    asked[1] = type(asked[1])(
        ask=asked[1].ask,
        request=type(asked[1].request)(
            id="again", prompt=asked[1].request.prompt, params=asked[1].request.params, seed=0
        ),
        labels={},
    )
    assert_same(target, SuffixDrafter, asked, (3, 6))


def test_what_cannot_be_replayed_is_refused_by_name(target: LlamaTarget) -> None:
    made = makers(target)
    params = SamplingParams(temperature=0.8, max_tokens=6)
    texts = [text_of(run, target) for run in decode(target, None, questions(1, params, vocab=VOCAB), 0).values()]
    for name in ("slice tree", "head tree", "merged"):
        with pytest.raises(ConfigError, match="sampled trees"):
            replay(target, made[name](), texts, (3,))
    with pytest.raises(ConfigError, match="min_prob"):
        replay(target, made["head min_prob"](), texts, (3,))
    assert refusal(made["merged"](), is_greedy=False, has_seed=True, verification="auto") is None
    assert refusal(made["ngram"](), is_greedy=False, has_seed=False, verification="auto") is None
    assert "share noise" in str(refusal(made["slice"](), is_greedy=False, has_seed=False, verification="compare"))


def test_drafts_end_with_the_draft_models_window() -> None:
    target = table_model(5)
    narrow = TableModel(table_model(6)._logits, max_positions=20)
    asked = questions(5, SamplingParams(max_tokens=30), vocab=7)
    assert_same(target, lambda: LMDrafter(narrow, name="narrow"), asked, (1, 3, 6))
