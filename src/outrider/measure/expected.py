r"""Drafts of models on texts that are already there, from the models' laws along the text.

*Drawn chains.* A draft token is kept with probability min(1, target / draft). That it was drawn *and* kept has probability
min(draft, target); that the text shows it, however it came about, target. So given a text y that the target has drawn, a
step that starts at s keeps at least i drafts with probability

    P(kept >= i) = prod over j <= i of min(1, draft_j(y_j) / target(y_j)),

draft_j being the law of the j-th draft token of a step that started there, along y. Where steps start is random too: a
start has the probability that earlier steps led to it (forward recursion: a step that keeps i commits i + 1). Averaged over
texts that the target draws, the counts are exactly those of decoding.

Two short cuts are biased (``tests/measure/test_expected.py`` shows by how much): products over depths of the laws' overlap
sum_v min(draft_j(v), target(v)) along a recorded text, since overlaps at neighbouring places hang together with what was
kept; and treating all positions as equally likely starts, since steps start where drafts fail.

*Any chain of a model whose law does not depend on the start.* One parallel pass of the draft model over the text tells what
it would draft at every place; every length and every start is read off that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftRequest, LawDrafter
from outrider.drafters.choice import DraftVocabulary, choose_tokens
from outrider.engine.taps import joined_taps, tap_reader
from outrider.measure.record import Counts
from outrider.measure.tally import Mark, Scores, Tally
from outrider.measure.target_pass import ReadText
from outrider.sampling.warp import warp_logits
from outrider.types import DraftMode

__all__ = ["FollowedText", "expected_tally", "score_drawn", "score_start_free"]

_LAWS_AT_ONCE = 256
_ROWS_AT_ONCE = 16


class FollowedText:
    """A text as a drafter meets it: token by token, with the taps of all tokens but the last.

    Args:
        drafter: is told that a sequence begins.
        read: the text. key: a fresh id.
    """

    def __init__(self, drafter: Drafter, read: ReadText, key: int) -> None:
        self.read = read
        self.key = key
        self.tokens = list(read.text.prompt)
        self._drafter = drafter
        self._reader = tap_reader(drafter)
        self._num_absorbed = 0
        drafter.start(key, self.tokens)
        self._absorb(len(self.tokens))

    def advance(self, num_output: int) -> None:
        """So many output tokens are committed."""
        text = self.read.text
        have = len(self.tokens) - len(text.prompt)
        if num_output == have:
            return
        self.tokens.extend(text.output[have:num_output])
        self._drafter.observe(self.key, self.tokens, num_output - have)
        self._absorb(len(self.tokens) - 1)

    def finish(self) -> None:
        """The whole text is committed."""
        self.advance(len(self.read.text.output))
        self._drafter.finish(self.key)

    def request(self, num_draft_tokens: int, mode: DraftMode, *, drafter: str = "") -> DraftRequest:
        """A wish for drafts behind what is committed; ``drafter`` names which of a portfolio's."""
        text = self.read.text
        return DraftRequest(
            sequence=self.key,
            tokens=self.tokens,
            num_draft_tokens=num_draft_tokens,
            mode=mode,
            params=text.params,
            seed=text.seed,
            choice=0,
            drafter=drafter,
        )

    def _absorb(self, end: int) -> None:
        if self._reader is None or end <= self._num_absorbed:
            return
        taps = {layer: self.read.taps[layer][self._num_absorbed : end] for layer in self._reader.taps}
        self._reader.absorb(self.key, self._num_absorbed, joined_taps(taps, self._reader.taps))
        self._num_absorbed = end


def score_start_free(
    drafter: LawDrafter,
    read: ReadText,
    lengths: Sequence[int],
    *,
    mode: DraftMode,
    key: int,
    watched: int | None = None,
) -> Scores:
    """Score chains of a drafter whose laws depend on the text alone, from one pass of its model over the text.

    Args:
        drafter: a :class:`outrider.drafters.base.LawDrafter` with ``is_start_free``.
        read: the text. lengths: most draft tokens of a step, each an arm.
        mode: how drafts are chosen. key: a fresh id. watched: the length whose passes are wanted one by one.
    """
    text = FollowedText(drafter, read, key)  # type: ignore[arg-type]
    output = read.text.output
    drafts: list[int] = [output[0]]  # by output index; the first token comes from prefill, nobody drafts it
    ratios: list[float] = [1.0]
    for start in range(1, len(output), _LAWS_AT_ONCE):
        text.advance(start)
        said = output[start : start + _LAWS_AT_ONCE]
        [logits_KU] = drafter.logits_along([text.request(len(said), mode)], [said])
        if mode is DraftMode.DRAWN:
            ratios += _ratios(logits_KU, read, start, drafter.vocabulary)
        else:
            drafts += _choices(logits_KU, text.request(1, mode), drafter.vocabulary)
    text.finish()
    if mode is not DraftMode.DRAWN:
        return _walked(read, _budgets(drafter, read, lengths), drafts, watched)
    budgets, longest = _budgets(drafter, read, lengths), max(lengths)
    from_start = [ratios[start : start + longest] for start in range(len(output))]
    return Scores(counts={k: expected_tally(budgets[k], from_start).counts() for k in lengths})


def _choices(logits_KU: Tensor, first: DraftRequest, vocabulary: DraftVocabulary) -> list[int]:
    """What would be drafted at each place; noise is keyed by the place alone."""
    chosen: list[int] = []
    for row in range(0, len(logits_KU), _ROWS_AT_ONCE):
        some_BU = logits_KU[row : row + _ROWS_AT_ONCE]
        begin = len(first.tokens) + row
        wishes = [_standing(first, begin + offset) for offset in range(len(some_BU))]
        chosen += choose_tokens(some_BU, wishes, 0, vocabulary)[0]
    return chosen


def _standing(request: DraftRequest, num_tokens: int) -> DraftRequest:
    """The request behind a text of so many tokens; only their number is looked at."""
    return DraftRequest(
        sequence=request.sequence,
        tokens=range(num_tokens),
        num_draft_tokens=1,
        mode=request.mode,
        params=request.params,
        seed=request.seed,
        choice=request.choice,
    )


def _budgets(drafter: LawDrafter, read: ReadText, lengths: Sequence[int]) -> dict[int, list[int]]:
    """Draft tokens of a step that starts at each output index: the engine's rule, and the drafter's window."""
    text = read.text
    most = [
        max(0, min(text.limit - start - 1, drafter.most_drafts(len(text.prompt) + start)))
        for start in range(len(text.output))
    ]
    return {k: [min(k, budget) for budget in most] for k in lengths}


def _walked(read: ReadText, budgets: Mapping[int, list[int]], drafts: Sequence[int], watched: int | None) -> Scores:
    """Walk from step to step where the draft of every place is known."""
    output = read.text.output
    run = [0] * (len(output) + 1)  # drafts in a row that the text goes on with
    for index in range(len(drafts) - 1, 0, -1):
        run[index] = run[index + 1] + 1 if drafts[index] == output[index] else 0
    counts: dict[int, Counts] = {}
    marks: list[Mark] = []
    for k, most in budgets.items():
        tally, start = Tally(), 1
        while start < len(output):
            kept = min(run[start], most[start])
            committed = min(kept + 1, len(output) - start)
            tally.add_chain(most[start], kept, committed)
            if k == watched:
                is_refused = kept < committed and kept < most[start]
                marks.append(Mark(start, kept, committed, (drafts[start + kept],) if is_refused else ()))
            start += committed
        counts[k] = tally.counts()
    return Scores(counts=counts, marks=tuple(marks))


def score_drawn(
    drafter: LawDrafter, reads: Sequence[ReadText], lengths: Sequence[int], *, keys: Iterator[int]
) -> list[Scores]:
    """Score drawn chains whose laws depend on where drafting began: laws from every place on, all texts together.

    Args:
        drafter: a :class:`outrider.drafters.base.LawDrafter`. reads: texts drawn without a seed.
        lengths: most draft tokens of a step, each an arm. keys: fresh ids.
    """
    texts = [FollowedText(drafter, read, next(keys)) for read in reads]  # type: ignore[arg-type]
    ratios: list[list[list[float]]] = [[[]] for _ in reads]  # by text, start, depth
    for start in range(1, max(len(read.text.output) for read in reads)):
        going = [index for index, read in enumerate(reads) if start < len(read.text.output)]
        for index in going:
            texts[index].advance(start)
        said = [reads[index].text.output[start : start + max(lengths)] for index in going]
        wishes = [texts[index].request(max(lengths), DraftMode.DRAWN) for index in going]
        for index, logits_KU in zip(going, drafter.logits_along(wishes, said), strict=True):
            ratios[index].append(_ratios(logits_KU, reads[index], start, drafter.vocabulary))
    for text in texts:
        text.finish()
    budgets = [_budgets(drafter, read, lengths) for read in reads]
    return [
        Scores(counts={k: expected_tally(most[k], each).counts() for k in lengths})
        for most, each in zip(budgets, ratios, strict=True)
    ]


def _ratios(logits_KU: Tensor, read: ReadText, start: int, vocabulary: DraftVocabulary) -> list[float]:
    """min(1, draft / target) of the output tokens from ``start`` on, one for each row."""
    found: list[float] = []
    for row in range(0, len(logits_KU), _ROWS_AT_ONCE):
        some_BU = logits_KU[row : row + _ROWS_AT_ONCE]
        probs_BU = warp_logits(some_BU, [read.text.params] * len(some_BU)).softmax(dim=-1)
        said = read.text.output[start + row : start + row + len(some_BU)]
        target = read.target_probs[start + row : start + row + len(some_BU)]
        draft = _probs_of(probs_BU, said, vocabulary)
        # A token of probability 0 was not drawn from this target; such a text is off-policy already.
        found += [min(1.0, d / t) if t > 0 else 1.0 for d, t in zip(draft, target, strict=True)]
    return found


def _probs_of(probs_BU: Tensor, tokens: Sequence[int], vocabulary: DraftVocabulary) -> list[float]:
    """Probability of one token in each row; 0 for those that the drafter does not have."""
    num_columns = probs_BU.shape[1]
    wanted_B = torch.tensor(tokens, device=probs_BU.device)
    if vocabulary.ids_U is None:
        columns_B, is_known_B = wanted_B.clamp(max=num_columns - 1), wanted_B < num_columns
    else:
        columns_B = torch.searchsorted(vocabulary.ids_U, wanted_B).clamp(max=num_columns - 1)
        is_known_B = vocabulary.ids_U[columns_B] == wanted_B
    probs_B = probs_BU.gather(1, columns_B.unsqueeze(1)).squeeze(1)
    return torch.where(is_known_B, probs_B, 0.0).tolist()


def expected_tally(budgets: Sequence[int], ratios: Sequence[Sequence[float]]) -> Tally:
    """Expected passes over a text whose first token comes from prefill.

    Args:
        budgets: draft tokens of a step that starts at each output index.
        ratios: for each start, min(1, draft / target) of the text's token at each depth of a step from there.
    """
    tally, num_output = Tally(), len(budgets)
    mass = [0.0] * (num_output + 1)
    mass[min(1, num_output)] = 1.0
    for start in range(1, num_output):
        if mass[start] == 0:
            continue
        survives = mass[start]
        budget, rest = budgets[start], num_output - start
        for kept in range(min(budget, rest)):
            goes_on = survives * ratios[start][kept]
            tally.add_chain(budget, kept, kept + 1, survives - goes_on)
            mass[start + kept + 1] += survives - goes_on
            survives = goes_on
        kept = min(budget, rest)
        tally.add_chain(budget, kept, min(kept + 1, rest), survives)
        mass[start + min(kept + 1, rest)] += survives
    return tally
