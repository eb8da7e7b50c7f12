"""Drafts from a text that the caller expects the output to repeat (OpenAI's ``prediction``): an edited file, a form filled in.

The text is laid behind the prompt's last tokens, so that its first token is what follows the prompt. Wherever the output's
last tokens stand in it, what follows them there is proposed: past an edit the output finds its way back in by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafters.base import DraftRequest
from outrider.types import NO_DRAFT, Proposal

__all__ = ["PredictedText", "PredictionDrafter"]

_LONGEST_MATCH = 12


@dataclass(slots=True)
class PredictedText:
    """A text and where each of its n-grams goes on; of several places the one behind the last match, else the first.

    Attributes:
        tokens: the prompt's last tokens, then the text.
        at: where the output was found last.
    """

    tokens: tuple[int, ...]
    max_match: int = _LONGEST_MATCH
    at: int = 0
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @staticmethod
    def after(prompt: Sequence[int], text: Sequence[int], *, max_match: int = _LONGEST_MATCH) -> PredictedText:
        """Index ``text`` as what follows ``prompt``."""
        before = tuple(prompt[len(prompt) - max_match :]) if len(prompt) > max_match else tuple(prompt)
        found = PredictedText((*before, *text), max_match)
        for follower in range(len(before), len(found.tokens)):
            for length in range(1, min(max_match, follower) + 1):
                found._places.setdefault(found.tokens[follower - length : follower], []).append(follower)
        return found

    def find(self, recent: Sequence[int]) -> tuple[int, int] | None:
        """Length of the longest match of the last tokens, and the index of what follows it."""
        for length in range(min(self.max_match, len(recent)), 0, -1):
            places = self._places.get(tuple(recent[len(recent) - length :]))
            if places:
                self.at = next((place for place in places if place >= self.at), places[0])
                return length, self.at
        return None

    def copy(self, follower: int, count: int) -> tuple[int, ...]:
        """Tokens from there on."""
        return self.tokens[follower : follower + count]


class PredictionDrafter:
    """Proposes only what a request's own ``prediction`` says; without one, nothing."""

    name = "prediction"
    reads_ahead = True

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._texts: dict[int, PredictedText] = {}

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """Remember what the text will be laid behind."""
        self._prompts[sequence] = tuple(tokens[max(0, len(tokens) - _LONGEST_MATCH) :])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One chain, or ``NO_DRAFT``, for each request."""
        return [self._propose_one(request) if request.prediction else NO_DRAFT for request in requests]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Nothing: the request brings the tokens."""

    def finish(self, sequence: int) -> None:
        """Forget the sequence."""
        del self._prompts[sequence]
        self._texts.pop(sequence, None)

    def _propose_one(self, request: DraftRequest) -> Proposal:
        text = self._texts.get(request.sequence)
        if text is None:
            text = PredictedText.after(self._prompts[request.sequence], request.prediction)
            self._texts[request.sequence] = text
        found = text.find((*request.tokens[-_LONGEST_MATCH:], *request.ahead))
        if found is None:
            return NO_DRAFT
        return Proposal.chain(text.copy(found[1], request.num_draft_tokens), drafter=self.name)
