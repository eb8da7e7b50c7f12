"""Prompt lookup: what followed these last tokens the last time they stood in this very text?

Every n-gram of a sequence points at the token that followed its latest occurrence. A proposal looks up the last tokens,
longest n-gram first, and copies what stood behind the match. There is no scan: a token is indexed once, when it is
committed, and a proposal is a handful of dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.base import DraftRequest
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, Proposal

__all__ = ["NGramDrafter", "copy_forward"]

_LONGEST_MATCH = 64


class NGramDrafter:
    """Prompt lookup over each sequence's own prompt and output.

    The longest match wins; among equally long ones the most recent (on greedy answers to 120 mixed prompts, 8 draft tokens,
    it commits 2.25 tokens a pass; the earliest one, which other engines take, 2.15). A continuation that reaches the end of
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
        self.max_match = max_match
        self.min_match = min_match
        # Sequence -> n-gram -> index of the token behind its latest occurrence. N-grams of all lengths share one table.
        self._tables: dict[int, dict[tuple[int, ...], int]] = {}

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """Index the prompt."""
        assert sequence not in self._tables, sequence
        self._tables[sequence] = {}
        self.observe(sequence, tokens, len(tokens))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One chain, or ``NO_DRAFT``, for each request."""
        return [self._propose_one(request) for request in requests]

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Index the n-grams that the new tokens follow."""
        table = self._tables[sequence]
        end = len(tokens)
        for length in range(self.min_match, self.max_match + 1):
            first = max(end - num_new, length)  # first follower that has a whole n-gram before it
            if first < end:
                window = tokens[first - length : end]
                grams = zip(*(window[offset:] for offset in range(length)), strict=False)
                table.update(zip(grams, range(first, end), strict=False))

    def finish(self, sequence: int) -> None:
        """Forget the sequence."""
        del self._tables[sequence]

    def _propose_one(self, request: DraftRequest) -> Proposal:
        tokens = request.tokens
        wanted = request.num_draft_tokens
        follower = self._find(self._tables[request.sequence], tokens) if wanted > 0 else None
        if follower is None:
            return NO_DRAFT
        return Proposal.chain(copy_forward(tokens, follower, wanted), drafter=self.name)

    def _find(self, table: dict[tuple[int, ...], int], tokens: Sequence[int]) -> int | None:
        end = len(tokens)
        for length in range(min(self.max_match, end), self.min_match - 1, -1):
            follower = table.get(tuple(tokens[end - length :]))
            if follower is not None:
                return follower
        return None


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
