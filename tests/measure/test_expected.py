"""Expected counts of drawn chains against the live law, by exact enumeration of everything that can happen."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from outrider.drafters.base import DraftRequest
from outrider.drafters.choice import DraftVocabulary
from outrider.drafters.lm import LMDrafter
from outrider.measure.answers import AnsweredText
from outrider.measure.record import Counts
from outrider.measure.replay import replay_group
from outrider.measure.tally import chain_report
from outrider.measure.target_pass import read_text
from outrider.metrics import SpeculationStats
from outrider.models.table import TableModel
from outrider.sampling.params import SamplingParams
from outrider.sampling.warp import warp_logits
from outrider.types import Proposal

VOCAB, EOS, PROMPT = 3, 2, (0, 1)
PARAMS = SamplingParams(temperature=0.8, top_p=0.97, max_tokens=5)
Law = Callable[[Sequence[int], int], Tensor]
"""Of the next token, given the text and how many drafts were made since the step began; ``[V]``, float64."""


def random_table(seed: int) -> TableModel:
    generator = torch.Generator().manual_seed(seed)
    return TableModel(torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 1.5, eos_token_ids=(EOS,))


def law_of(table: TableModel) -> Law:
    def law(text: Sequence[int], depth: int) -> Tensor:
        logits_BV = table._logits[text[-2], text[-1]].unsqueeze(0)
        return warp_logits(logits_BV, [PARAMS]).softmax(dim=-1)[0].double()

    return law


class Drifting:
    """A drafter whose laws get worse with depth, so that they depend on where drafting began, as a head's do."""

    def __init__(self, table: TableModel) -> None:
        self.name = "drifting"
        self.vocabulary = DraftVocabulary(target_size=VOCAB)
        self.is_start_free = False
        self._table = table
        self._texts: dict[int, list[int]] = {}

    def law(self, text: Sequence[int], depth: int) -> Tensor:
        logits_BV = self.logits(text, depth).unsqueeze(0)
        return warp_logits(logits_BV, [PARAMS]).softmax(dim=-1)[0].double()

    def logits(self, text: Sequence[int], depth: int) -> Tensor:
        return self._table._logits[text[-2], text[-1]] / (1 + depth)

    def most_drafts(self, num_tokens: int) -> int:
        return 100

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        self._texts[sequence] = list(tokens)

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        self._texts[sequence] = list(tokens)

    def finish(self, sequence: int) -> None:
        del self._texts[sequence]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        raise AssertionError("a drawn chain is scored by its laws")

    def logits_along(self, requests: Sequence[DraftRequest], continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        found = []
        for request, tokens in zip(requests, continuations, strict=True):
            text = self._texts[request.sequence]
            assert text == list(request.tokens)
            found.append(torch.stack([self.logits([*text, *tokens[:depth]], depth) for depth in range(len(tokens))]))
        return found


def texts(target: Law, limit: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every output that can come out, and its probability."""

    def grow(output: tuple[int, ...], prob: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if output and (output[-1] == EOS or len(output) == limit):
            yield output, prob
            return
        for token, share in enumerate(target((*PROMPT, *output), 0).tolist()):
            if share > 0:
                yield from grow((*output, token), prob * share)

    return grow((), 1.0)


def live_counts(target: Law, draft: Law, limit: int, k: int) -> Counts:
    """Expected counts of decoding with rejection: every draft, acceptance and correction is integrated.

    A step keeps drafts a_1..a_j and corrects with x with probability prod min(target, draft)(a_i) * max(target - draft, 0)(x).
    """
    passes: dict[tuple[int, int, int], float] = defaultdict(float)

    def step(output: tuple[int, ...], prob: float) -> None:
        if output[-1] == EOS or len(output) == limit or prob == 0:
            return
        budget = min(k, limit - len(output) - 1)

        def verify(kept: tuple[int, ...], prob: float) -> None:
            text = (*PROMPT, *output, *kept)
            p = target(text, 0)
            if len(kept) == budget:
                ends = p.tolist()
            else:
                q = draft(text, len(kept))
                both = torch.minimum(p, q).tolist()
                ends = (p - torch.minimum(p, q)).tolist()
                for token in range(VOCAB):
                    if both[token] > 0:
                        verify((*kept, token), prob * both[token])
            for token in range(VOCAB):
                if ends[token] > 0:
                    commit(kept, token, prob * ends[token])

        def commit(kept: tuple[int, ...], token: int, prob: float) -> None:
            run = (*kept, token)
            if EOS in run:
                run = run[: run.index(EOS) + 1]
            passes[budget, len(kept), len(run)] += prob
            step((*output, *run), prob)

        verify((), prob)

    for token, share in enumerate(target(PROMPT, 0).tolist()):
        step((token,), share)
    return Counts.pooled(
        Counts.from_stats(SpeculationStats.pooled([_stats(key)])).times(weight) for key, weight in passes.items()
    )


def _stats(key: tuple[int, int, int]) -> SpeculationStats:
    stats = SpeculationStats()
    stats.add(chain_report(*key))
    return stats


def replayed_counts(table: TableModel, drafter: object, limit: int, lengths: Sequence[int]) -> dict[int, Counts]:
    """What replay expects, averaged over every text with its probability."""
    found: dict[int, list[Counts]] = {k: [] for k in lengths}
    keys = itertools.count()
    for output, prob in texts(law_of(table), limit):
        text = AnsweredText(
            id="x", line=1, labels={}, prompt=PROMPT, output=output, params=PARAMS, seed=0, limit=limit,
            is_generated=True, settings={},
        )  # fmt: skip
        read = read_text(table, text)
        assert read.is_on_policy and len(read.target_probs) == len(output)
        [scores] = replay_group(drafter, [read], lengths, keys=keys)  # type: ignore[arg-type]
        for k in lengths:
            found[k].append(scores.counts[k].times(prob))
    return {k: Counts.pooled(each) for k, each in found.items()}


def close(one: Counts, other: Counts) -> bool:
    depth = max(len(one.reached), len(other.reached))

    def numbers(counts: Counts) -> list[float]:
        by_depth = [*counts.reached, *[0.0] * depth][:depth] + [*counts.kept, *[0.0] * depth][:depth]
        return [counts.passes, counts.steps, counts.committed, counts.drafted, counts.accepted, *by_depth]

    return all(abs(a - b) < 1e-6 for a, b in zip(numbers(one), numbers(other), strict=True))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("limit", [2, 5])
def test_expectations_of_a_language_models_chains_are_the_live_law(seed: int, limit: int) -> None:
    table, draft = random_table(seed), random_table(seed + 10)
    found = replayed_counts(table, LMDrafter(draft, name="lm"), limit, (1, 2, 4))
    for k, counts in found.items():
        assert close(counts, live_counts(law_of(table), law_of(draft), limit, k)), k
        assert (counts.accepted > 0.01) == (limit > 2)


@pytest.mark.parametrize("seed", [3, 5])
def test_expectations_are_the_live_law_where_laws_depend_on_the_start(seed: int) -> None:
    table, draft = random_table(seed), Drifting(random_table(seed + 10))
    found = replayed_counts(table, draft, 5, (1, 3, 4))
    for k, counts in found.items():
        assert close(counts, live_counts(law_of(table), draft.law, 5, k)), k
        assert counts.accepted > 0.01


def naive_lengths(target: Law, draft: Law, limit: int, k: int) -> tuple[float, float]:
    """Accepted length by two short cuts: overlaps multiplied along recorded text, and every position a start.

    Returns:
        With overlaps (at uniform starts); with the right acceptance, but at uniform starts.
    """
    overlaps = rights = steps = 0.0
    for output, prob in texts(target, limit):
        for start in range(1, len(output)):
            budget = min(k, limit - start - 1)
            if budget == 0:
                continue
            steps += prob
            by_overlap, right = 1.0, 1.0
            for depth in range(min(budget, len(output) - start)):
                text = (*PROMPT, *output[: start + depth])
                p, q, said = target(text, 0), draft(text, depth), output[start + depth]
                by_overlap *= float(torch.minimum(p, q).sum())
                right *= min(1.0, float(q[said] / p[said]))
                overlaps += prob * by_overlap
                rights += prob * right
    return 1 + overlaps / steps, 1 + rights / steps


def test_the_short_cuts_are_biased() -> None:
    """By how much, in accepted length; docs/measure.md quotes these numbers."""
    errors = []
    for seed in (1, 5):
        table, draft = random_table(seed), law_of(random_table(seed + 10))
        truth = live_counts(law_of(table), draft, 6, 4).accepted_length
        assert truth is not None
        by_overlap, uniform = naive_lengths(law_of(table), draft, 6, 4)
        errors.append((by_overlap - truth, uniform - truth))
    print("bias of overlaps, of uniform starts:", errors)
    assert max(abs(overlap) for overlap, _ in errors) > 0.02
    assert max(abs(uniform) for _, uniform in errors) > 0.02
