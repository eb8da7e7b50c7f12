"""Two engines' drafts counted alike.

Both pool: sums over requests first, one division last. Accepted length is 1 + accepted / steps, and the rate at position
i is *unconditional*: steps that kept a draft token there, over all steps (vLLM's ``num_accepted_tokens_per_pos`` over
``num_drafts``). They differ at the end of an answer, where a step may have more accepted draft tokens than the answer has
room for:

* vLLM counts before it looks for stop tokens and the limit: what is cut off counts as accepted, and drafts are not made
  shorter as the limit comes near.
* Outrider counts afterwards: what is cut off counts neither as drafted nor as accepted, and no more is drafted than may be
  committed.

So each engine's own figures stand beside figures over *whole steps*, by which they are compared: steps that began with room
for the whole chain and the token behind it, and that did not end the answer.

Two bfloat16 engines round differently, and where the target's two likeliest tokens are near a tie, the answers part. From
there on the head drafts for different texts, easier or harder ones. So whole steps are counted once more over the *same
text*: the tokens before the answers part. There nothing differs but the engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Counts", "count_own", "count_whole", "shared_lengths", "worst_gap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request as an engine decoded it.

    Attributes:
        tokens: output ids. drafted, accepted: of each pass that had drafts, in order, as the engine counts them.
    """

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Pooled counts: ``kept[i]`` steps kept a draft token at position i."""

    steps: int
    drafted: int
    accepted: int
    kept: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """1 + accepted / steps; 1 without a step."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def rates(self) -> list[float]:
        """Unconditional rate of each position."""
        return [count / self.steps if self.steps else 0.0 for count in self.kept]

    def to_json(self) -> dict[str, Any]:
        """Counts and what follows from them."""
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "kept": list(self.kept),
            "accepted_length": round(self.accepted_length, 4),
            "rates": [round(rate, 4) for rate in self.rates],
        }


def count_own(answers: Iterable[Answer], num_draft_tokens: int) -> Counts:
    """All steps, as the engine counted them."""
    return _pooled(
        [step for each in answers for step in zip(each.drafted, each.accepted, strict=True)], num_draft_tokens
    )


def count_whole(
    answers: Sequence[Answer], num_draft_tokens: int, *, max_tokens: int, lengths: Sequence[int] | None = None
) -> Counts:
    """Whole steps only, see above.

    Each step commits its accepted draft tokens and one more; the first token of an answer comes from the prompt's pass.

    Args:
        answers: of one engine. num_draft_tokens: length of a chain. max_tokens: the limit of an answer.
        lengths: count only steps that end within so many tokens of each answer.
    """
    steps: list[tuple[int, int]] = []
    for index, each in enumerate(answers):
        length = len(each.tokens) if lengths is None else lengths[index]
        committed = 1
        for drafted, accepted in zip(each.drafted, each.accepted, strict=True):
            has_room = committed + num_draft_tokens + 1 <= max_tokens
            committed += accepted + 1
            if has_room and committed < len(each.tokens) and committed <= length:
                assert drafted == num_draft_tokens, "a chain that was cut short in the middle of an answer"
                steps.append((drafted, accepted))
    return _pooled(steps, num_draft_tokens)


def shared_lengths(ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[int]:
    """How many tokens two engines' answers have in common before they part."""
    found = []
    for one, other in zip(ours, theirs, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=False))
        found.append(next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs)))
    return found


def worst_gap(one: Counts, other: Counts) -> float:
    """Largest difference of accepted length and of the rates at all positions."""
    gaps = [abs(a - b) for a, b in zip(one.rates, other.rates, strict=True)]
    return max([abs(one.accepted_length - other.accepted_length), *gaps])


def _pooled(steps: Sequence[tuple[int, int]], num_draft_tokens: int) -> Counts:
    return Counts(
        steps=len(steps),
        drafted=sum(drafted for drafted, _ in steps),
        accepted=sum(accepted for _, accepted in steps),
        kept=tuple(sum(accepted > position for _, accepted in steps) for position in range(num_draft_tokens)),
    )
