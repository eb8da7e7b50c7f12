"""Teacher forcing: the law that every token of an answer was drawn from, and what the token was worth under it.

An answer is read again by the target, a block of rows at a time, and each row's logits are processed with that position's own
history. Of every law only a few numbers stay; logits never outlive their block. A token is placed in its law with the
others ordered by *falling probability*: its randomised probability integral transform is the mass of all likelier tokens plus
a random share of its own, and is uniform if the token is a draw. (Ordered by token id, a fault that sharpens or blurs the law
would hardly move it.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.audit.guesses import NO_GUESS, Output, drafter_guesses, ngram_guesses
from outrider.audit.orders import History, ProcessorOrder, warped_logits
from outrider.audit.statistics import TILT_LEANS, Flags, Floats
from outrider.cache.base import Cache
from outrider.drafters.base import Drafter
from outrider.engine.request import build_request
from outrider.engine.taps import joined_taps, wanted_taps
from outrider.models.base import PackedRows, Target
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState

__all__ = ["Outside", "Scorer", "Scores"]

PREFILL_CHUNK = 256
BLOCK = 64
"""Rows whose logits are held at once."""
_DENSE_SHARE = 8
"""A law that keeps less than this share of the vocabulary is measured on what it keeps."""
_MIN_GAP, _MAX_GAP = 1e-9, 50.0
"""Logits: a smaller gap is rounding, a larger one a prohibition."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A token that cannot come out of the recomputed law.

    Attributes:
        prompt_id, position: where; position counts output tokens from 0.
        gap: how far all raw logits must move, at least, for it to be possible; infinite for a forbidden token.
    """

    prompt_id: str
    position: int
    token: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a run of tokens was worth, one entry a token, outputs behind one another.

    Attributes:
        output: index of the token's output within the run. position: among the output's tokens.
        inside: False where the token cannot come out of the recomputed law (the numbers of such a token mean nothing).
        gap: by how much it is outside (:class:`Outside`), 0 inside.
        u: randomised probability integral transform. logprob, entropy, variance: of the token; of its law; of the law's
            log-probability. log_tilts: ``log sum p ** (1 + lean)`` for every lean, ``[tokens, leans]``.
        hits, probs, named, is_mode: for each guess: it came out; its probability; there was one; it was the law's mode.
    """

    output: Ints
    position: Ints
    inside: Flags
    gap: Floats
    u: Floats
    logprob: Floats
    entropy: Floats
    variance: Floats
    log_tilts: Floats
    hits: Mapping[str, Flags]
    probs: Mapping[str, Floats]
    named: Mapping[str, Flags]
    is_mode: Mapping[str, Flags]
    outside: tuple[Outside, ...] = ()

    def __len__(self) -> int:
        return len(self.output)

    def output_logprobs(self, num_outputs: int) -> Floats:
        """Log-probability of each whole output."""
        sums = np.zeros(num_outputs)
        np.add.at(sums, self.output, np.where(self.inside, self.logprob, 0.0))
        return sums


@dataclass(frozen=True, slots=True)
class _Block:
    """What one block of one output gave; arrays as in :class:`Scores`, guesses stacked ``[guesses, tokens]``."""

    inside: Tensor
    u: Tensor
    logprob: Tensor
    entropy: Tensor
    variance: Tensor
    log_tilts: Tensor
    hits: Tensor
    probs: Tensor
    named: Tensor
    is_mode: Tensor


class Scorer:
    """Scores outputs under one target and one set of sampling fields.

    Args:
        target: the weights at hand.
        params: as the request had them (words of ``bad_words`` are turned into token ids here).
        order: how the engine applies them.
        noise: shares of the randomised transform.
        make_drafter: whose guesses to follow, besides the n-gram continuation; ``None`` for none.
    """

    def __init__(
        self,
        target: Target,
        *,
        params: SamplingParams,
        order: ProcessorOrder,
        noise: np.random.Generator,
        make_drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        tokenizer = getattr(target, "tokenizer", None)
        request = build_request([0], params, id="audit", seed=0, spec=target.spec, tokenizer=tokenizer)
        self._target = target
        self._params = request.params
        self._order = order
        self._noise = noise
        self._make_drafter = make_drafter
        self._taps = wanted_taps(make_drafter()) if make_drafter is not None else ()

    @property
    def guess_names(self) -> tuple[str, ...]:
        """Which guesses are followed."""
        return ("n-gram",) if self._make_drafter is None else ("n-gram", "drafter")

    @torch.inference_mode()
    def score(self, outputs: Sequence[Output]) -> Scores:
        """Read outputs again; outputs of one prompt that stand together share the reading of it."""
        cache = self._target.new_cache()
        taps: list[Tensor] | None = [] if self._taps else None
        guesses = [ngram_guesses(outputs)]
        if self._make_drafter is not None and taps is None:
            guesses.append(drafter_guesses(self._make_drafter, outputs, taps=None))
        laws = _Laws(self._target, cache, self._taps)
        if self._make_drafter is not None and taps is not None:
            taps.extend(laws.taps_of(output) for output in outputs)
            guesses.append(drafter_guesses(self._make_drafter, outputs, taps=taps))
        blocks: list[_Block] = []
        outside: list[Outside] = []
        for index, start, logits_TV in laws.blocks(outputs):
            stop = start + logits_TV.shape[0]
            named = [list(each[index][start:stop]) for each in guesses]
            block = self._measure(outputs[index], start, logits_TV, named)
            outside += self._outside(outputs[index], start, logits_TV, block.inside)
            blocks.append(block)
        return self._join(outputs, blocks, tuple(outside))

    def _history(self, output: Output, start: int, stop: int) -> History:
        state = SamplingState(
            self._params,
            prompt_tokens=output.prompt,
            vocab_size=self._target.spec.vocab_size,
            eos_token_ids=self._target.spec.eos_token_ids,
            seed=0,
            choice=0,
        )
        state.commit(output.tokens[:start])
        paths = [output.tokens[start:position] for position in range(start, stop)]
        return History(state=state, prompt=output.prompt, paths=paths)

    def _measure(self, output: Output, start: int, logits_TV: Tensor, named: Sequence[Sequence[int]]) -> _Block:
        stop = start + logits_TV.shape[0]
        history = self._history(output, start, stop)
        warped_TV = warped_logits(logits_TV.clone(), history, self._order)
        tokens_T = torch.tensor(output.tokens[start:stop], device=warped_TV.device)
        guesses_GT = torch.tensor(named, device=warped_TV.device).reshape(len(named), len(tokens_T))
        shares_T = torch.as_tensor(self._noise.random(len(tokens_T)), device=warped_TV.device)
        return _place(warped_TV, tokens_T, guesses_GT, shares_T)

    def _outside(self, output: Output, start: int, logits_TV: Tensor, inside_T: Tensor) -> Iterator[Outside]:
        for row in (~inside_T).nonzero().flatten().tolist():
            position = start + row
            gap = self._gap(output, position, logits_TV[row : row + 1])
            yield Outside(prompt_id=output.prompt_id, position=position, token=output.tokens[position], gap=gap)

    def _gap(self, output: Output, position: int, logits_1V: Tensor) -> float:
        """Smallest e such that moving every raw logit by at most e makes the output's token possible, by bisection.

        What helps most: likelier tokens move down by e, the token itself and all others up.
        """
        token = output.tokens[position]
        history = self._history(output, position, position + 1)
        whole = replace(self._params, top_k=0, top_p=1.0, min_p=0.0)
        free = SamplingState(
            whole,
            prompt_tokens=output.prompt,
            vocab_size=self._target.spec.vocab_size,
            eos_token_ids=self._target.spec.eos_token_ids,
            seed=0,
            choice=0,
        )
        free.commit(output.tokens[:position])
        scores_1V = warped_logits(logits_1V.clone(), replace(history, state=free), self._order)
        signs_1V = torch.where(scores_1V > scores_1V[:, token : token + 1], -1.0, 1.0)

        def is_possible(shift: float) -> bool:
            moved_1V = (logits_1V.double() + shift * signs_1V).to(logits_1V.dtype)
            return bool(warped_logits(moved_1V, history, self._order)[0, token] > -math.inf)

        low, high = _MIN_GAP, _MAX_GAP
        if not is_possible(high):
            return math.inf
        while high > 1.001 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if is_possible(middle) else (middle, high)
        return high

    def _join(self, outputs: Sequence[Output], blocks: Sequence[_Block], outside: tuple[Outside, ...]) -> Scores:
        def column(name: str) -> Floats:
            parts = [getattr(block, name).cpu().numpy() for block in blocks]
            axis = 0 if name in {"inside", "u", "logprob", "entropy", "variance", "log_tilts"} else 1
            return np.concatenate(parts, axis=axis)

        lengths = [len(output.tokens) for output in outputs]
        by_guess = {name: column(name) for name in ("hits", "probs", "named", "is_mode")}
        flat = {f.name: column(f.name) for f in fields(_Block) if f.name not in by_guess}

        def of_guess(name: str) -> dict[str, Floats]:
            return {guess: by_guess[name][row] for row, guess in enumerate(self.guess_names)}

        gaps = np.zeros(sum(lengths))
        gaps[~flat["inside"].astype(np.bool_)] = [each.gap for each in outside]
        return Scores(
            output=np.repeat(np.arange(len(outputs)), lengths),
            position=np.concatenate([np.arange(length) for length in lengths]),
            inside=flat["inside"].astype(np.bool_),
            gap=gaps,
            u=flat["u"],
            logprob=flat["logprob"],
            entropy=flat["entropy"],
            variance=flat["variance"],
            log_tilts=flat["log_tilts"],
            hits={name: each.astype(np.bool_) for name, each in of_guess("hits").items()},
            probs=of_guess("probs"),
            named={name: each.astype(np.bool_) for name, each in of_guess("named").items()},
            is_mode={name: each.astype(np.bool_) for name, each in of_guess("is_mode").items()},
            outside=outside,
        )


class _Laws:
    """Raw logits behind every output position, a block at a time."""

    def __init__(self, target: Target, cache: Cache, taps: Sequence[int]) -> None:
        self._target, self._cache, self._taps = target, cache, taps

    def blocks(self, outputs: Sequence[Output]) -> Iterator[tuple[int, int, Tensor]]:
        """Index of the output, first position, and logits of at most ``BLOCK`` positions."""
        indexes = range(len(outputs))
        for prompt, group in groupby(indexes, key=lambda index: outputs[index].prompt):
            slot = self._cache.allocate(len(prompt))
            first_1V = self._read_prompt(prompt, slot)
            for index in group:
                yield from ((index, *block) for block in self._read_output(outputs[index], slot, first_1V))
            self._cache.free(slot)

    def taps_of(self, output: Output) -> Tensor:
        """Hidden states of all positions of prompt and output."""
        text = (*output.prompt, *output.tokens)
        slot = self._cache.allocate(len(text))
        parts = []
        for start in range(0, len(text), PREFILL_CHUNK):
            rows = self._pack(text[start : start + PREFILL_CHUNK], slot, start, (0,))
            taps = self._target.forward_greedy(rows, self._cache, taps=self._taps).taps
            parts.append(joined_taps(taps, self._taps))
        self._cache.free(slot)
        return torch.cat(parts)

    def _read_prompt(self, prompt: Sequence[int], slot: int) -> Tensor:
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = prompt[start : start + PREFILL_CHUNK]
            rows = self._pack(chunk, slot, start, (len(chunk) - 1,))
            logits_1V = self._target.forward(rows, self._cache).logits_RV
        return logits_1V.clone()

    def _read_output(self, output: Output, prompt_slot: int, first_1V: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The prompt's last row gives the law of token 0; row i of the output that of token i + 1."""
        if not output.tokens:
            return
        yield 0, first_1V
        num_prompt = len(output.prompt)
        slot = self._cache.allocate(num_prompt + len(output.tokens))
        self._cache.copy_prefix(prompt_slot, slot, num_prompt)
        read = output.tokens[:-1]
        for start in range(0, len(read), BLOCK):
            rows = self._pack(read[start : start + BLOCK], slot, num_prompt + start, None)
            yield start + 1, self._target.forward(rows, self._cache).logits_RV
        self._cache.free(slot)

    def _pack(self, tokens: Sequence[int], slot: int, start: int, logit_rows: tuple[int, ...] | None) -> PackedRows:
        return PackedRows.pack(
            [tokens], slots=[slot], starts=[start], device=self._target.spec.device, logit_rows=logit_rows
        )


def _place(warped_TV: Tensor, tokens_T: Tensor, guesses_GT: Tensor, shares_T: Tensor) -> _Block:
    """Place each token and each guess in its row's law."""
    values_TM, ids_TM = _kept(warped_TV)
    logprobs_TM = values_TM.double().log_softmax(dim=-1)
    probs_TM = logprobs_TM.exp()
    own_T1 = warped_TV.gather(1, tokens_T.unsqueeze(1))
    inside_T = own_T1.squeeze(1) > -math.inf
    is_likelier_TM = (values_TM > own_T1) | ((values_TM == own_T1) & (ids_TM < tokens_T.unsqueeze(1)))
    is_own_TM = ids_TM == tokens_T.unsqueeze(1)
    own_prob_T = (probs_TM * is_own_TM).sum(dim=-1)
    finite_TM = logprobs_TM.masked_fill(values_TM == -math.inf, 0.0)
    entropy_T = -(probs_TM * finite_TM).sum(dim=-1)
    leans = torch.tensor(TILT_LEANS, dtype=torch.float64, device=values_TM.device)
    tilts = [((1 + lean) * logprobs_TM).logsumexp(dim=-1) for lean in leans]
    best_T1 = values_TM.amax(dim=-1, keepdim=True)
    mode_T = ids_TM.masked_fill(values_TM < best_T1, warped_TV.shape[1]).amin(dim=-1)
    named_GT = guesses_GT != NO_GUESS
    guess_probs = [(probs_TM * (ids_TM == guess_T.unsqueeze(1))).sum(dim=-1) for guess_T in guesses_GT]
    return _Block(
        inside=inside_T,
        u=(probs_TM * is_likelier_TM).sum(dim=-1) + shares_T * own_prob_T,
        logprob=own_prob_T.clamp_min(1e-300).log(),
        entropy=entropy_T,
        variance=((probs_TM * finite_TM**2).sum(dim=-1) - entropy_T**2).clamp_min(0),
        log_tilts=torch.stack(tilts, dim=1),
        hits=guesses_GT == tokens_T,
        probs=torch.stack(guess_probs) if len(guess_probs) else named_GT.double(),
        named=named_GT,
        is_mode=guesses_GT == mode_T,
    )


def _kept(warped_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and ids of everything that may come out of any row; all tokens if that is a large part of them."""
    vocab_size = warped_TV.shape[1]
    size = int((warped_TV > -math.inf).sum(dim=-1).amax())
    if size * _DENSE_SHARE < vocab_size:
        found = warped_TV.topk(size, dim=-1)
        return found.values, found.indices
    return warped_TV, torch.arange(vocab_size, device=warped_TV.device).expand_as(warped_TV)
