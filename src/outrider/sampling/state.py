"""What one sequence remembers for processing its laws: fields, seed, and the history that penalties and bans read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from outrider.errors import SamplingError
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams

__all__ = ["SamplingState", "bad_word_ids", "check_token_ids"]


class SamplingState:
    """One choice of one request.

    Attributes:
        params: the request's fields, ``bad_words`` already turned into ``bad_words_token_ids``.
        seed, choice: key all noise, together with absolute positions.
        num_prompt, num_output: lengths; the next token's absolute position is their sum.
        is_plain_greedy: True if the next token is the argmax of the raw logits, always.
        is_checked_greedy: True if it is that wherever the grammar allows it.
        grammar: where the output stands in its grammar, ``None`` without one.
    """

    __slots__ = (
        "_always_banned",
        "_banned_sequences",
        "_counts",
        "_early_banned",
        "_output",
        "choice",
        "grammar",
        "is_checked_greedy",
        "is_plain_greedy",
        "num_output",
        "num_prompt",
        "params",
        "seed",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_tokens: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int,
        choice: int,
    ) -> None:
        """Raises SamplingError if a field names a token id outside the vocabulary."""
        check_token_ids(params, vocab_size)
        assert not params.bad_words or params.bad_words_token_ids, "bad_words must be turned into token ids first"
        self.params = params
        self.seed = seed
        self.choice = choice
        self.num_prompt = len(prompt_tokens)
        self.num_output = 0
        self._output: list[int] = []
        # Occurrences in the output of every token seen so far; tokens of the prompt alone have 0.
        self._counts: dict[int, int] = dict.fromkeys(prompt_tokens, 0) if params.has_penalties else {}
        sequences = [tuple(ids) for ids in params.bad_words_token_ids]
        self._always_banned = frozenset(ids[0] for ids in sequences if len(ids) == 1)
        self._banned_sequences = [ids for ids in sequences if len(ids) > 1]
        self._early_banned = _early_banned(params, eos_token_ids, vocab_size)
        has_masks = bool(sequences or self._early_banned or params.logit_bias)
        self.is_plain_greedy = params.is_greedy and not has_masks and not params.has_penalties
        self.is_checked_greedy = False
        self.grammar: GrammarMatcher | None = None

    def constrain(self, grammar: GrammarMatcher) -> None:
        """From here on the output must match this grammar; before anything is committed."""
        assert self.grammar is None and self.num_output == 0
        self.grammar = grammar
        self.is_checked_greedy, self.is_plain_greedy = self.is_plain_greedy, False

    def commit(self, tokens: Iterable[int]) -> None:
        """Append output tokens to the history."""
        tokens = tuple(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)
        self._output.extend(tokens)
        if self.params.has_penalties:
            for token in tokens:
                self._counts[token] = self._counts.get(token, 0) + 1
        self.num_output = len(self._output)

    def banned_tokens(self, path: Sequence[int]) -> set[int]:
        """Token ids that must not follow the output and the draft tokens in ``path``."""
        banned = set(self._always_banned)
        if self._early_banned and self.num_output + len(path) < self.params.min_tokens:
            banned |= self._early_banned
        if self._banned_sequences:
            longest = max(map(len, self._banned_sequences)) - 1
            recent = (*self._output[-longest:], *path)
            banned.update(ids[-1] for ids in self._banned_sequences if recent[1 - len(ids) :] == ids[:-1])
        return banned

    def seen_counts(self, path: Sequence[int]) -> dict[int, int]:
        """Occurrences in output and ``path`` of every token of prompt, output and ``path`` (do not change it)."""
        if not path:
            return self._counts
        counts = dict(self._counts)
        for token in path:
            counts[token] = counts.get(token, 0) + 1
        return counts


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse fields that name tokens which the target does not have.

    Raises:
        SamplingError: naming field and token id.
    """
    named = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "bad_words_token_ids": [token for ids in params.bad_words_token_ids for token in ids],
    }
    for name, tokens in named.items():
        worst = max(tokens, default=0)
        if worst >= vocab_size:
            raise SamplingError(f"{name} names token id {worst}; allowed: ids below the vocabulary's {vocab_size}")


def bad_word_ids(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """Token id sequences of banned words, as vLLM builds them: each word as it is, and with a space before it.

    The second form counts only if it is another first token and no longer than the first form, so that a lone space
    token is never what gets banned.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        if bare:
            sequences.append(bare)
        if spaced and (not bare or (spaced[0] != bare[0] and len(spaced) == len(bare))):
            sequences.append(spaced)
    return sequences


def _early_banned(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> frozenset[int]:
    """What ``min_tokens`` forbids. Like vLLM's, it forbids end-of-sequence tokens even if they would not stop anything."""
    if params.min_tokens == 0:
        return frozenset()
    return frozenset(token for token in (*eos_token_ids, *params.stop_token_ids) if token < vocab_size)
