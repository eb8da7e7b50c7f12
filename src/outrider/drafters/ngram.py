"""Prompt lookup: what followed these last tokens the last time they stood in this very text?

Every n-gram of a sequence points at the token that followed its latest occurrence. A proposal looks up the last tokens,
longest n-gram first, and copies what stood behind the match. There is no scan: a token is indexed once, when the first
draft behind it is asked for, and a proposal is a handful of dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import DraftRequest
from outrider.drafters.prediction import PredictedText
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, Proposal

__all__ = ["NGramDrafter", "copy_forward"]

_LONGEST_MATCH = 64


class NGramDrafter:
    """Prompt lookup over each sequence's own prompt and output.

    The longest match wins; among equally long ones the most recent (on greedy answers to 120 mixed prompts, 8 draft tokens,
    it commits 2.25 tokens a pass; the earliest one, which other engines take, 2.15). A request's ``prediction`` is looked
    up beside its own text, and wins among equally long matches. A continuation that reaches the end of
    the text goes on into itself, so that a repetition of period d is continued for as many tokens as are wanted.

    Args:
        max_match: longest n-gram that is looked up (3, 4, 8, 12: 2.241, 2.243, 2.255, 2.258 tokens a pass).
        min_match: shortest n-gram that counts as a match. 1 drafts most often, and commits most tokens a pass.

    Raises:
        ConfigError: unless 1 <= min_match <= max_match <= 64.
    """

    def __init__(self, *, max_match: int = 8, min_match: int = 1) -> None:
        if not 1 <= min_match <= max_match <= _LONGEST_MATCH:
            raise ConfigError(
                f"n-gram matches of {min_match} to {max_match} tokens are not possible; "
                f"allowed: 1 <= min_match <= max_match <= {_LONGEST_MATCH}"
            )
        self.name = "ngram"
        self.reads_ahead = True
        self.max_match = max_match
        self.min_match = min_match
        # Sequence -> n-gram -> index of the token behind its latest occurrence. N-grams of all lengths share one table.
        self._tables: dict[int, dict[tuple[int, ...], int]] = {}
        self._num_indexed: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}  # their last tokens
        self._predicted: dict[int, PredictedText] = {}

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence begins. Its text is indexed when the first draft is asked for."""
        assert sequence not in self._tables, sequence
        self._tables[sequence] = {}
        self._num_indexed[sequence] = 0
        self._prompts[sequence] = tuple(tokens[max(0, len(tokens) - self.max_match) :])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One chain, or ``NO_DRAFT``, for each request."""
        return [self._propose_one(request) for request in requests]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Nothing yet: whoever drafts rarely indexes rarely."""

    def finish(self, sequence: int) -> None:
        """Forget the sequence."""
        del self._tables[sequence], self._num_indexed[sequence], self._prompts[sequence]
        self._predicted.pop(sequence, None)

    def _caught_up(self, sequence: int, tokens: Sequence[int]) -> dict[tuple[int, ...], int]:
        """The sequence's table, with the n-grams that tokens not seen before follow."""
        table, begin, end = self._tables[sequence], self._num_indexed[sequence], len(tokens)
        for length in range(self.min_match, self.max_match + 1):
            first = max(begin, length)  # first follower that has a whole n-gram before it
            if first < end:
                window = tokens[first - length : end]
                grams = zip(*(window[offset:] for offset in range(length)), strict=False)
                table.update(zip(grams, range(first, end), strict=False))
        self._num_indexed[sequence] = end
        return table

    def _propose_one(self, request: DraftRequest) -> Proposal:
        tokens = [*request.tokens, *request.ahead] if request.ahead else request.tokens
        wanted = request.num_draft_tokens
        if wanted < 1:
            return NO_DRAFT
        length, follower = self._find(self._caught_up(request.sequence, request.tokens), tokens)
        if request.prediction:
            predicted = self._predicted_text(request)
            found = predicted.find(tokens[-self.max_match :])
            if found is not None and found[0] >= max(length, self.min_match):
                return Proposal.chain(predicted.copy(found[1], wanted), drafter=self.name)
        return Proposal.chain(copy_forward(tokens, follower, wanted), drafter=self.name) if length else NO_DRAFT

    def _predicted_text(self, request: DraftRequest) -> PredictedText:
        """The request's prediction, laid behind its prompt."""
        found = self._predicted.get(request.sequence)
        if found is None:
            prompt = self._prompts[request.sequence]
            found = PredictedText.after(prompt, request.prediction, max_match=self.max_match)
            self._predicted[request.sequence] = found
        return found

    def _find(self, table: dict[tuple[int, ...], int], tokens: Sequence[int]) -> tuple[int, int]:
        """Length of the longest match of the last tokens, 0 for none, and the index of what follows it."""
        end = len(tokens)
        for length in range(min(self.max_match, end), self.min_match - 1, -1):
            follower = table.get(tuple(tokens[end - length :]))
            if follower is not None:
                return length, follower
        return 0, end


def copy_forward(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """``count`` tokens from index ``start`` on, going on into the copy itself at the end of the text.

    >>> copy_forward([7, 1, 2], 1, 5)
    [1, 2, 1, 2, 1]
    """
    copied = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(copied) < count:
        copied.extend(copied[len(copied) - period : count - period])
    return copied
