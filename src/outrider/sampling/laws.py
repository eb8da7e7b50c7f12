"""The target's processed law at any node of a step: what verifiers ask (see :mod:`outrider.verify.base`).

Processing is lazy. Sequences that take the argmax of the raw logits cost one argmax over the step's rows; all others are
processed only at places that a walk arrives at, with the history of exactly that path. Where greedy decoding is bound by
a grammar alone, the argmax is asked for first: if the grammar allows it, it is the masked law's argmax too, and no mask
is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.rng import Purpose, gumbel_BV, noise_key, uniform
from outrider.sampling.draw import argmax_tokens, draw_processed, draw_weights
from outrider.sampling.masks import forbid_by_grammar
from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.sampling.warp import warp_logits
from outrider.types import TokenLogprobs

__all__ = ["ProcessedLaws", "process_logits"]

_ROWS_AT_ONCE = 16
"""Places that are drawn together: bounds the copies of logits."""


class _Place(Protocol):
    """A node of a step, see :class:`outrider.verify.base.Place` (which this layer may not import)."""

    @property
    def sequence(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def path(self) -> tuple[int, ...]: ...


def process_logits(logits_BV: Tensor, states: Sequence[SamplingState], paths: Sequence[Sequence[int]]) -> Tensor:
    """Masks, ``logit_bias`` and penalties of each row, in place; history is the state's plus the row's path.

    Args:
        logits_BV: raw target logits, float32 or float64; overwritten.
        states: the sequence of each row.
        paths: draft tokens between the last committed token and each row.
    """
    forbid_by_grammar(logits_BV, [state.grammar for state in states], paths)
    _forbid(logits_BV, [state.banned_tokens(path) for state, path in zip(states, paths, strict=True)])
    _add_bias(logits_BV, [state.params for state in states])
    _penalise(logits_BV, states, paths)
    return logits_BV


class ProcessedLaws:
    """Laws and keyed noise of one step.

    Args:
        logits_RV: raw target logits of the step's packed rows, float32 (float64 in exact tests).
        first_rows: the root row of each sequence (shared where choices share a prompt). Node i's row is i + 1 behind it.
        states: one a sequence; must not be committed to while these laws are in use.
        argmax_R: the likeliest token of each row, where the pass found it on the way.
    """

    def __init__(
        self,
        logits_RV: Tensor,
        *,
        first_rows: Sequence[int],
        states: Sequence[SamplingState],
        argmax_R: Sequence[int] | None = None,
    ) -> None:
        assert len(first_rows) == len(states)
        self._logits_RV = logits_RV
        self._first_rows = first_rows
        self._states = states
        self._argmax_R: dict[int, int] = {} if argmax_R is None else dict(enumerate(argmax_R))

    def choose(self, places: Sequence[_Place]) -> list[int]:
        """The next token at each place: the argmax, or Gumbel-argmax with the noise of its absolute position."""
        tokens = [-1] * len(places)
        greedy, checked, processed, drawn = self._by_kind(places)
        for index in greedy:
            tokens[index] = self._raw_argmax(places[index])
        if checked:
            _fill(tokens, checked, self._allowed_argmax([places[index] for index in checked]))
        if processed:
            logits_BV = self._masked_logits([places[index] for index in processed])
            _fill(tokens, processed, argmax_tokens(logits_BV))
        for start in range(0, len(drawn), _ROWS_AT_ONCE):
            part = drawn[start : start + _ROWS_AT_ONCE]
            standing = [places[index] for index in part]
            logits_BV = self._masked_logits(standing)
            _fill(tokens, part, draw_processed(logits_BV, self._params(standing), self._keys(standing, Purpose.TARGET)))
        return tokens

    def probs_BV(self, places: Sequence[_Place]) -> Tensor:
        """The processed law at each place; a greedy sequence's is all on its argmax."""
        logits_BV = self._masked_logits(places)
        is_greedy = [self._states[place.sequence].params.is_greedy for place in places]
        if not any(is_greedy):
            return warp_logits(logits_BV, self._params(places)).softmax(dim=-1)
        probs_BV = torch.zeros_like(logits_BV)
        best = argmax_tokens(logits_BV)
        for row, place in enumerate(places):
            if is_greedy[row]:
                probs_BV[row, best[row]] = 1
            else:
                probs_BV[row] = warp_logits(logits_BV[row : row + 1], self._params([place])).softmax(dim=-1)[0]
        return probs_BV

    def uniforms(self, places: Sequence[_Place]) -> list[float]:
        """Acceptance uniforms of the position behind each place."""
        return [uniform(key) for key in self._keys(places, Purpose.ACCEPT)]

    def draw_from(self, weights_BV: Tensor, places: Sequence[_Place]) -> list[int]:
        """Draw correction tokens from unnormalised residual laws."""
        noise_BV = gumbel_BV(self._keys(places, Purpose.RESIDUAL), weights_BV.shape[1], weights_BV.device)
        return draw_weights(weights_BV, noise_BV)

    def token_logprobs(
        self, sequence: int, nodes: Sequence[int], tokens: Sequence[int], paths: Sequence[tuple[int, ...]]
    ) -> list[TokenLogprobs]:
        """Log-probabilities for reports, raw or processed as the request asks.

        Args:
            sequence: index of the sequence in the step.
            nodes: the node behind which each token was chosen, ``ROOT`` for the first.
            tokens: the committed tokens.
            paths: draft tokens from the root to each node, itself included.
        """
        state = self._states[sequence]
        assert state.params.logprobs is not None
        if not nodes:
            return []
        rows = self._logits_RV[[self._first_rows[sequence] + node + 1 for node in nodes]]
        if state.params.logprobs_mode == "processed":
            rows = process_logits(rows, [state] * len(nodes), paths)
            if not state.params.is_greedy:
                rows = warp_logits(rows, [state.params] * len(nodes))
        logprobs_TV = rows.log_softmax(dim=-1)
        return [
            _logprobs_of(row_V, token, state.params.logprobs) for row_V, token in zip(logprobs_TV, tokens, strict=True)
        ]

    def _by_kind(self, places: Sequence[_Place]) -> tuple[list[int], list[int], list[int], list[int]]:
        greedy: list[int] = []
        checked: list[int] = []
        processed: list[int] = []
        drawn: list[int] = []
        for index, place in enumerate(places):
            state = self._states[place.sequence]
            if state.is_checked_greedy:
                checked.append(index)
                continue
            kind = greedy if state.is_plain_greedy else processed if state.params.is_greedy else drawn
            kind.append(index)
        return greedy, checked, processed, drawn

    def _row(self, place: _Place) -> int:
        return self._first_rows[place.sequence] + place.node + 1

    def _raw_argmax(self, place: _Place) -> int:
        if self._row(place) not in self._argmax_R:
            rows = self._plain_greedy_rows()
            is_all = len(rows) == self._logits_RV.shape[0]
            best = argmax_tokens(self._logits_RV if is_all else self._logits_RV[rows])
            self._argmax_R.update(zip(rows, best, strict=True))
        return self._argmax_R[self._row(place)]

    def _allowed_argmax(self, places: Sequence[_Place]) -> list[int]:
        """The likeliest allowed token at each place; masks are computed only where the likeliest of all is forbidden."""
        tokens = [-1] * len(places)
        free: list[int] = []
        for index, place in enumerate(places):
            forced = self._grammar(place).forced(place.path)
            if forced:
                tokens[index] = forced[0]
            else:
                free.append(index)
        best = self._raw_argmaxes([places[index] for index in free])
        forbidden: list[int] = []
        for index, token in zip(free, best, strict=True):
            tokens[index] = token
            if not self._grammar(places[index]).allows(places[index].path, token):
                forbidden.append(index)
        if forbidden:
            _fill(tokens, forbidden, argmax_tokens(self._masked_logits([places[index] for index in forbidden])))
        return tokens

    def _raw_argmaxes(self, places: Sequence[_Place]) -> list[int]:
        """The likeliest token at each place, whoever it belongs to."""
        unknown = [place for place in places if self._row(place) not in self._argmax_R]
        if unknown:
            best = argmax_tokens(self._raw_logits(unknown))
            self._argmax_R.update(zip((self._row(place) for place in unknown), best, strict=True))
        return [self._argmax_R[self._row(place)] for place in places]

    def _grammar(self, place: _Place) -> GrammarMatcher:
        grammar = self._states[place.sequence].grammar
        assert grammar is not None, "only sequences with a grammar are checked"
        return grammar

    def _raw_logits(self, places: Sequence[_Place]) -> Tensor:
        rows_B = torch.tensor([self._row(place) for place in places], device=self._logits_RV.device)
        return self._logits_RV.index_select(0, rows_B)

    def _plain_greedy_rows(self) -> list[int]:
        starts = sorted(set(self._first_rows))
        ends = dict(zip(starts, [*starts[1:], self._logits_RV.shape[0]], strict=True))
        greedy = {start for start, state in zip(self._first_rows, self._states, strict=True) if state.is_plain_greedy}
        return [row for start in starts if start in greedy for row in range(start, ends[start])]

    def _masked_logits(self, places: Sequence[_Place]) -> Tensor:
        states = [self._states[place.sequence] for place in places]
        return process_logits(self._raw_logits(places), states, [place.path for place in places])

    def _params(self, places: Sequence[_Place]) -> list[SamplingParams]:
        return [self._states[place.sequence].params for place in places]

    def _keys(self, places: Sequence[_Place], purpose: Purpose) -> list[int]:
        keys: list[int] = []
        for place in places:
            state = self._states[place.sequence]
            position = state.num_prompt + state.num_output + len(place.path)
            keys.append(noise_key(state.seed, state.choice, position, purpose))
        return keys


def _fill(tokens: list[int], indexes: Sequence[int], values: Sequence[int]) -> None:
    for index, value in zip(indexes, values, strict=True):
        tokens[index] = value


def _entries(per_row: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and token indexes of ragged lists of token ids, flat."""
    rows = [row for row, tokens in enumerate(per_row) for _ in tokens]
    flat = [token for tokens in per_row for token in tokens]
    return torch.tensor(rows, device=device), torch.tensor(flat, device=device)


def _forbid(logits_BV: Tensor, banned: Sequence[set[int]]) -> None:
    if any(banned):
        logits_BV[_entries([sorted(tokens) for tokens in banned], logits_BV.device)] = -math.inf


def _add_bias(logits_BV: Tensor, params: Sequence[SamplingParams]) -> None:
    if not any(p.logit_bias for p in params):
        return
    entries = _entries([list(p.logit_bias) for p in params], logits_BV.device)
    values = [value for p in params for value in p.logit_bias.values()]
    logits_BV[entries] += torch.tensor(values, dtype=logits_BV.dtype, device=logits_BV.device)


def _penalise(logits_BV: Tensor, states: Sequence[SamplingState], paths: Sequence[Sequence[int]]) -> None:
    """Repetition first (divide what is positive, multiply what is not), then frequency and presence are subtracted."""
    counts = [
        state.seen_counts(path) if state.params.has_penalties else {} for state, path in zip(states, paths, strict=True)
    ]
    if not any(counts):
        return
    entries = _entries([list(row) for row in counts], logits_BV.device)
    repetition, frequency, presence = (_per_entry(values, counts, logits_BV) for values in _penalties(states))
    times = torch.tensor([n for row in counts for n in row.values()], dtype=logits_BV.dtype, device=logits_BV.device)
    values = logits_BV[entries]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits_BV[entries] = values - frequency * times - presence * (times > 0)


def _penalties(states: Sequence[SamplingState]) -> tuple[list[float], list[float], list[float]]:
    params = [state.params for state in states]
    return (
        [p.repetition_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.presence_penalty for p in params],
    )


def _per_entry(values: Sequence[float], counts: Sequence[dict[int, int]], like: Tensor) -> Tensor:
    """Repeat each row's value once for every one of its entries."""
    repeats = torch.tensor([len(row) for row in counts], device=like.device)
    return torch.tensor(values, dtype=like.dtype, device=like.device).repeat_interleave(repeats)


def _logprobs_of(logprobs_V: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """The chosen token's entry; ``top`` holds only tokens in the law's support, and the chosen one always."""
    top: list[tuple[int, float]] = []
    if num_top > 0:
        floor = logprobs_V.topk(min(num_top, logprobs_V.shape[0])).values[-1]
        ids = ((logprobs_V >= floor) & (logprobs_V > -math.inf)).nonzero().flatten()
        pairs = zip(ids.tolist(), logprobs_V[ids].tolist(), strict=True)
        top = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:num_top]
    logprob = float(logprobs_V[token])
    if all(token != other for other, _ in top):
        top.append((token, logprob))
    return TokenLogprobs(token=token, logprob=logprob, top=tuple(top))
