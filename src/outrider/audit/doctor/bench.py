"""A head's wirings, each measured on the same texts, and the search for the one that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.audit.doctor.anatomy import Parts
from outrider.audit.doctor.replay import AnsweredText, draft_ids, read_texts, walk
from outrider.audit.doctor.report import Finding, Gain, compare
from outrider.audit.doctor.wiring import Candidate, Wiring, candidates, target_ids
from outrider.drafters.eagle_config import EagleConfig
from outrider.metrics import SpeculationStats
from outrider.models.base import Target

__all__ = ["Bench", "Mended", "Pair", "mend"]

Pair = tuple[Sequence[int], Sequence[int]]
"""A prompt and its greedy answer."""

_MOST_ROUNDS = 3


class Bench:
    """Measures wirings of one head on one target's answers.

    Args:
        parts: the head's folder.
        target: whose answers. embedding_VD: its embedding table.
        pairs: prompts and greedy answers of at least two tokens.
        num_draft_tokens: draft tokens a step.
        layers: hidden states to read at once; others are read when they are asked for.
    """

    def __init__(
        self,
        parts: Parts,
        target: Target,
        embedding_VD: Tensor,
        pairs: Sequence[Pair],
        *,
        num_draft_tokens: int,
        layers: Sequence[int] = (),
    ) -> None:
        self.parts, self.target = parts, target
        self._embedding_VD, self._pairs, self._num_steps = embedding_VD, list(pairs), num_draft_tokens
        self._drafted: dict[tuple[EagleConfig, int], list[Tensor] | None] = {}
        self._texts: list[AnsweredText] = []
        self.read(layers)

    @property
    def longest(self) -> int:
        """Entries of the longest text."""
        return max(len(prompt) + len(answer) for prompt, answer in self._pairs)

    def read(self, layers: Sequence[int]) -> list[AnsweredText]:
        """The texts with at least these layers' hidden states."""
        have = set(self._texts[0].taps) if self._texts else set()
        wanted = sorted(have | {layer for layer in layers if 0 <= layer <= self.target.spec.num_layers})
        if not self._texts or set(wanted) != have:
            self._texts = read_texts(self.target, self._pairs, wanted)
        return self._texts

    def plain(self) -> list[SpeculationStats]:
        """What a drafter that does not load makes: one token a pass."""
        sizes = [len(text.starts) for text in self._texts]
        return [SpeculationStats(passes=size, committed=size) for size in sizes]

    def score(self, wiring: Wiring) -> list[SpeculationStats] | None:
        """Counts of each text; ``None`` if the tensors or the target do not allow this wiring."""
        ids_U = target_ids(self.parts, wiring.vocabulary)
        is_fitting = max(wiring.config.tap_layers) <= self.target.spec.num_layers
        if ids_U is None or not is_fitting or len(ids_U) != wiring.config.draft_vocab_size:
            return None
        key = (wiring.config, wiring.window)
        if key not in self._drafted:
            self._drafted[key] = self._draft(wiring)
        drafted = self._drafted[key]
        if drafted is None:
            return None
        return [walk(text, ids_U[each]) for text, each in zip(self._texts, drafted, strict=True)]

    def _draft(self, wiring: Wiring) -> list[Tensor] | None:
        head = self.parts.head(wiring.config, self._embedding_VD)
        if head is None or wiring.config.target_hidden_size != self.target.spec.hidden_size:
            return None
        texts = self.read(wiring.config.tap_layers)
        return [draft_ids(head, text, window=wiring.window, num_steps=self._num_steps) for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """The wiring that fits best, what was mended on the way, and what was tried in vain.

    Attributes:
        stats: counts of each text with it; ``None`` if no wiring of this head can be run.
    """

    wiring: Wiring
    findings: tuple[Finding, ...]
    stats: list[SpeculationStats] | None


def mend(bench: Bench, wiring: Wiring, looks_like: tuple[int, ...], say: Callable[[str], None]) -> Mended:
    """Mend what helps most, then look again, since two mistakes may hide one another."""
    findings: list[Finding] = []
    tried: dict[str, tuple[int, Gain]] = {}
    for _ in range(_MOST_ROUNDS):
        before = bench.score(wiring) or bench.plain()
        best: tuple[Candidate, Gain] | None = None
        for other in _candidates(bench, wiring, looks_like):
            say(f"measuring {other.cause}: {', '.join(map(str, other.wiring.config.tap_layers))}")
            after = bench.score(other.wiring)
            if after is None:
                continue
            gain = compare(before, after)
            number, largest = tried.get(other.cause, (0, gain))
            tried[other.cause] = number + 1, max(gain, largest, key=lambda each: each.after)
            if gain.is_proved and (best is None or gain.after > best[1].after):
                best = other, gain
        if best is None:
            break
        findings.append(_proved(*best))
        wiring = best[0].wiring
    found = {finding.cause for finding in findings}
    clear = [_clear(cause, *each) for cause, each in tried.items() if cause not in found]
    return Mended(wiring=wiring, findings=(*findings, *clear), stats=bench.score(wiring))


def _candidates(bench: Bench, wiring: Wiring, looks_like: tuple[int, ...]) -> list[Candidate]:
    if wiring.window >= bench.longest:
        wiring = replace(wiring, window=max(wiring.window, 1 << 20))
    spec = bench.target.spec
    found = candidates(
        bench.parts, wiring, num_layers=spec.num_layers, target_vocab_size=spec.vocab_size, looks_like=looks_like
    )
    return list(found)


def _proved(candidate: Candidate, gain: Gain) -> Finding:
    return Finding(
        cause=candidate.cause,
        place="wiring",
        status="proved",
        title=candidate.title,
        evidence=gain.to_text(),
        remedy=candidate.remedy,
        gain=gain,
    )


_TITLES = {
    "d2t": "Meaning of d2t",
    "vocabulary": "Padded vocabulary",
    "tap_layers": "Layers that the head reads",
    "norm_flags": "Norm flags",
    "files": "The head's two files",
    "window": "Positions that the head looks back at",
}


def _clear(cause: str, number: int, best: Gain) -> Finding:
    return Finding(
        cause=cause,
        place="wiring",
        status="clear",
        title=_TITLES[cause],
        evidence=f"{number} other ways measured, the best: {best.to_text()}",
    )
