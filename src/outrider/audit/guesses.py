"""Tokens named before they come: what a biased engine would favour, fixed by the past alone.

Two guesses. The n-gram continuation is what prompt lookup would draft. The drafter's own guess is the mode of its law behind
the text so far: what a fault that favours drafts favours most. Never a draft that was drawn, and nothing about its fate: both
depend on the noise that also chose the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftRequest
from outrider.drafters.ngram import NGramDrafter
from outrider.engine.taps import tap_reader
from outrider.sampling.params import SamplingParams
from outrider.types import ROOT, DraftMode, Proposal

__all__ = ["NO_GUESS", "Output", "drafter_guesses", "ngram_guesses"]

NO_GUESS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One answer as token ids.

    Attributes:
        prompt_id: names the prompt. prompt: its token ids as the engine read them. tokens: of the answer, the end included.
        seed: that was given to the engine for it; ``None`` if the engine chose.
    """

    prompt_id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: int | None = None


def ngram_guesses(outputs: Sequence[Output]) -> list[list[int]]:
    """The n-gram continuation at every output position, ``NO_GUESS`` where no n-gram matches."""
    return drafter_guesses(NGramDrafter, outputs, taps=None)


@torch.inference_mode()
def drafter_guesses(
    make: Callable[[], Drafter], outputs: Sequence[Output], *, taps: Sequence[Tensor] | None
) -> list[list[int]]:
    """The likeliest first draft token at every output position; all outputs advance together.

    Args:
        make: a maker of a fresh drafter, that has seen nothing.
        outputs: answers.
        taps: for a drafter that reads hidden states, those of each output's positions from 0 on, ``[positions, A * D]``.
    """
    drafter = make()
    reader = tap_reader(drafter)
    for key, output in enumerate(outputs):
        drafter.start(key, output.prompt)
        if reader is not None and taps is not None:
            reader.absorb(key, 0, taps[key][: len(output.prompt)])
    guesses = [[NO_GUESS] * len(output.tokens) for output in outputs]
    texts = [list(output.prompt) for output in outputs]
    for step in range(max((len(output.tokens) for output in outputs), default=0)):
        going = [key for key, output in enumerate(outputs) if step < len(output.tokens)]
        # As in the engine, nobody drafts the token that the prompt's own pass yields.
        if step > 0:
            requests = [_request(key, texts[key]) for key in going]
            for key, proposal in zip(going, drafter.propose(requests), strict=True):
                guesses[key][step] = _first_token(proposal)
        for key in going:
            texts[key].append(outputs[key].tokens[step])
            drafter.observe(key, texts[key], 1)
            if reader is not None and taps is not None and step > 0:
                position = len(texts[key]) - 2
                reader.absorb(key, position, taps[key][position : position + 1])
    for key in range(len(outputs)):
        drafter.finish(key)
    return guesses


def _request(key: int, tokens: Sequence[int]) -> DraftRequest:
    return DraftRequest(
        sequence=key,
        tokens=tokens,
        num_draft_tokens=1,
        mode=DraftMode.GREEDY,
        params=SamplingParams(),
        seed=0,
        choice=0,
    )


def _first_token(proposal: Proposal) -> int:
    first = proposal.children(ROOT)
    return proposal.tokens[first[0]] if first else NO_GUESS
