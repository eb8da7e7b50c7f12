"""Stop rules, exact inside a commit of many tokens: every committed token is judged one by one, in order.

A token may end the output because it is an end-of-sequence or stop token id, because it completes a stop string, or
because it is the last one allowed. What a pass committed behind that token never existed.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.models.tokenizer import Detokenizer, Tokenizer
from outrider.sampling.params import SamplingParams
from outrider.types import FinishReason

__all__ = ["OutputText", "StopRules"]


class StopRules:
    """Decides after which token the output of one sequence ends.

    Args:
        params: the request's sampling fields.
        eos_token_ids: the model's own end-of-sequence tokens.
        limit: most output tokens (``max_tokens``, or less where the window ends).
    """

    def __init__(self, params: SamplingParams, *, eos_token_ids: Sequence[int], limit: int) -> None:
        eos = () if params.ignore_eos else eos_token_ids
        self.token_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        self.min_tokens = params.min_tokens
        self.limit = limit

    def scan(self, tokens: Sequence[int], *, num_output: int, text: OutputText) -> tuple[int, FinishReason | None]:
        """Judge newly committed tokens; feeds those that count to ``text``.

        Args:
            tokens: what the pass committed, in order.
            num_output: output tokens before them.

        Returns:
            How many of the tokens count, and why the output ended, or ``None``.
        """
        for index, token in enumerate(tokens):
            count = num_output + index + 1
            hit_string = text.add(token, may_stop=count >= self.min_tokens)
            if (token in self.token_ids and count >= self.min_tokens) or hit_string:
                return index + 1, FinishReason.STOP
            if count >= self.limit:
                return index + 1, FinishReason.LENGTH
        return len(tokens), None


class OutputText:
    """Text of one output as it grows, cut before the first stop string.

    ``take`` hands out text that can never change again: a tail that may still become a stop string or that ends inside
    a character is held back.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._text = ""
        self._taken = 0
        self._ended = False

    @property
    def text(self) -> str:
        """All text so far, cut before the stop string that ended it."""
        return self._text

    def add(self, token: int, *, may_stop: bool) -> bool:
        """Append one token; True if it completed a stop string (only looked for where ``may_stop``)."""
        if self._detokenizer is None:
            return False
        if not self._stop:
            self._text += self._detokenizer.add((token,))
            return False
        searched = max(0, len(self._text) - max((len(s) for s in self._stop), default=1) + 1)
        self._text += self._detokenizer.add([token])
        return may_stop and self._cut_at_stop(searched)

    def take(self) -> str:
        """Text that is final and was not handed out before."""
        end = len(self._text) - (0 if self._ended else self._held_back())
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def finish(self) -> None:
        """No token follows: nothing is held back any more."""
        if not self._ended and self._detokenizer is not None:
            self._text += self._detokenizer.finish()
        self._ended = True

    def abandon(self) -> None:
        """The output ended by a fault: what is there stays, and the tokenizer is not asked again."""
        self._ended = True

    def _cut_at_stop(self, searched: int) -> bool:
        found = [at for at in (self._text.find(s, searched) for s in self._stop) if at >= 0]
        if not found:
            return False
        self._text = self._text[: min(found)]
        self._ended = True
        return True

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
