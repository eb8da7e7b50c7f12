"""Texts that a small target has said, and two ways to count drafters on them: decoding, and replay."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.drafters.base import Drafter
from outrider.engine.sequence import Request
from outrider.engine.taps import wanted_taps
from outrider.measure.answers import AnsweredText, Question
from outrider.measure.live import LiveRun, decode_live
from outrider.measure.reading import Ask
from outrider.measure.record import Counts
from outrider.measure.replay import replay_group
from outrider.measure.tally import Scores
from outrider.measure.target_pass import read_text
from outrider.models.base import Target
from outrider.sampling.params import SamplingParams
from outrider.traffic import Row


def question(index: int, prompt: Sequence[int], params: SamplingParams) -> Question:
    """A request for these tokens."""
    request = Request(id=str(index), prompt=tuple(prompt), params=params, seed=params.seed or 0)
    return Question(
        ask=Ask(row=Row(id=str(index), line=index + 1, prompt=list(prompt)), labels={}), request=request, labels={}
    )


def questions(count: int, params: SamplingParams, *, vocab: int, seed: int = 0) -> list[Question]:
    """Random prompts that repeat themselves a little."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        some = [rng.randrange(1, vocab) for _ in range(rng.randint(3, 7))]
        found.append(question(index, some + some[: rng.randint(0, 3)], params))
    return found


def text_of(run: LiveRun, target: Target) -> AnsweredText:
    """What a decoding said, as a text."""
    request = run.question.request
    return AnsweredText(
        id=request.id,
        line=1,
        labels={},
        prompt=request.prompt,
        output=run.output,
        params=request.params,
        seed=request.seed,
        limit=min(request.params.max_tokens, target.spec.max_positions - len(request.prompt)),
        is_generated=True,
        settings={},
    )


def decode(
    target: Target, drafter: Drafter | None, asked: Sequence[Question], k: int, *, verification: str = "auto"
) -> dict[str, LiveRun]:
    """Decode one request after the other."""
    runs = decode_live(target, drafter, asked, num_draft_tokens=k, batch_size=1, verification=verification)
    return {run.question.request.id: run for run in runs}


def replay(
    target: Target,
    drafter: Drafter,
    texts: Sequence[AnsweredText],
    lengths: Sequence[int],
    *,
    group: int = 1,
    watched: int | None = None,
) -> dict[str, Scores]:
    """Score texts, ``group`` at a time, in order."""
    keys = itertools.count()
    found: dict[str, Scores] = {}
    for start in range(0, len(texts), group):
        some = texts[start : start + group]
        reads = [read_text(target, text, wanted_taps(drafter)) for text in some]
        assert all(read.agreement in (None, 1.0) for read in reads)
        for text, scores in zip(some, replay_group(drafter, reads, lengths, keys=keys, watched=watched), strict=True):
            found[text.id] = scores
    return found


def assert_same(
    target: Target,
    make: Callable[[], Drafter],
    asked: Sequence[Question],
    lengths: Sequence[int],
    *,
    group: int = 1,
) -> None:
    """Replay counts what decoding counts, pass for pass, for every length at once."""
    plain = decode(target, None, asked, 0)
    texts = [text_of(plain[each.request.id], target) for each in asked]
    longest = max(lengths)
    scores = replay(target, make(), texts, lengths, group=group, watched=longest)
    for k in lengths:
        live = decode(target, make(), asked, k)
        for text in texts:
            run = live[text.id]
            assert run.output == text.output
            counted = replace(run.counts, draft_ms=0.0, verify_ms=0.0, other_ms=0.0)
            assert padded(scores[text.id].counts[k]) == padded(counted), (text.id, k)
            if k == longest:
                assert scores[text.id].marks == run.marks, (text.id, k)


def padded(counts: Counts) -> Counts:
    """Depths that nothing reached say nothing."""
    ends = max((depth + 1 for depth, count in enumerate(counts.reached) if count), default=0)
    return replace(counts, reached=counts.reached[:ends], kept=counts.kept[:ends])
