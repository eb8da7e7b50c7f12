"""The drafter protocol. A new drafter is twenty lines: see docs/adding-a-drafter.md.

A drafter is told when a sequence starts, what was committed, and when it ends; between, it is asked for proposals for
the whole batch at once. It never sees logits of the target nor verdicts of tokens it has not proposed, and it never
decides what is kept: a bad drafter costs speed, never output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.sampling.params import SamplingParams
from outrider.types import DraftMode, Proposal

__all__ = ["DraftRequest", "Drafter", "DrafterWithPath", "ModelDrafter", "TapDrafter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """One sequence's wish for drafts.

    Attributes:
        sequence: id of the sequence, as given to ``start``.
        tokens: prompt and all committed tokens (the same growing list each time; do not change it).
        num_draft_tokens: most depth wanted (chains: most tokens); the drafter may give fewer, or none.
        mode: how a drafter with a law of its own must choose (see :class:`outrider.types.DraftMode`).
        params: the request's sampling fields.
        seed, choice: with the absolute position they key the noise of ``SHARED`` and ``DRAWN`` drafts (law 7). The token
            at index i of the sequence has position i; the first draft token's position is ``len(tokens)``.
        drafter: which of a portfolio's drafters is asked (:mod:`outrider.drafters.portfolio`); all others ignore it.
    """

    sequence: int
    tokens: Sequence[int]
    num_draft_tokens: int
    mode: DraftMode
    params: SamplingParams
    seed: int
    choice: int
    drafter: str = ""


class Drafter(Protocol):
    """Something that proposes."""

    name: str

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence with this prompt begins."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request, in order; ``NO_DRAFT`` where there is nothing to say."""
        ...

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """``tokens[-num_new:]`` were committed (the same growing list; do not change it)."""
        ...

    def finish(self, sequence: int) -> None:
        """The sequence ended; forget it (or remember its text for others)."""
        ...


@runtime_checkable
class TapDrafter(Protocol):
    """A drafter that also reads the target's hidden states.

    Attributes:
        taps: which ones; index i is the residual stream before target layer i (``ForwardResult.taps``).
    """

    taps: tuple[int, ...]

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        """What the target computed for the committed tokens at positions ``start`` and on.

        Called after ``start`` for each chunk of the prompt, and after each pass for the rows that were kept, in order of
        position. Positions whose cache was taken over from an earlier request have no taps: the first call may come with
        any ``start``. A token's taps come before the next proposal is asked for, the last committed token's only after
        the next pass, which reads it.

        Args:
            sequence: id of the sequence.
            start: position of the first row.
            taps_RD: one row a position: the taps behind one another in the order of ``taps``.
        """
        ...


@runtime_checkable
class DrafterWithPath(Protocol):
    """A drafter whose own passes run on one of several paths; results say which.

    Attributes:
        path: which code, and the precision: ``native-amx int8``, ``pytorch bfloat16``.
    """

    path: str


@runtime_checkable
class ModelDrafter(Protocol):
    """A drafter that runs passes of a model, which are worth timing and planning. All others are taken for cheap.

    Attributes:
        cost_key: what its passes' times depend on: shape, precision, path; tables of times are kept by it.
        nodes_per_level: draft nodes for each level of depth, 1 for chains.
        deepest: most levels that it ever drafts.
        card_rates: of the drafts at each depth that verification arrived at, the share that was kept when the drafter was
            evaluated; empty where nobody knows.
    """

    cost_key: str
    nodes_per_level: float
    deepest: int
    card_rates: tuple[float, ...]

    def backlog(self, sequence: int, num_tokens: int) -> int:
        """Rows that it would have to read before it can draft behind a sequence of ``num_tokens`` committed tokens."""
        ...
