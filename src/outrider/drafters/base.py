"""The drafter protocol. A new drafter is twenty lines: see docs/adding-a-drafter.md.

A drafter is told when a sequence starts, what was committed, and when it ends; between, it is asked for proposals for
the whole batch at once. It never sees logits of the target nor verdicts of tokens it has not proposed, and it never
decides what is kept: a bad drafter costs speed, never output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from outrider.sampling.matcher import GrammarMatcher
from outrider.sampling.params import SamplingParams
from outrider.types import DraftMode, Proposal

if TYPE_CHECKING:
    from outrider.drafters.choice import DraftVocabulary

__all__ = [
    "MOST_DRAFTS",
    "AheadDrafter",
    "CompositeDrafter",
    "DraftRequest",
    "Drafter",
    "DrafterWithMemory",
    "DrafterWithPath",
    "LawDrafter",
    "ModelDrafter",
    "SharingDrafter",
    "TapDrafter",
    "parts_of",
]

MOST_DRAFTS = 128
"""Longest chain that an engine may ask for (``outrider.engine.config.MAX_DRAFT_TOKENS``)."""


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
        grammar: what the output must match. A drafter that chooses by a law masks it with the grammar *before* it chooses
            (:func:`outrider.drafters.constrain.mask_drafts`); whatever it proposes, a token that was drawn is never taken
            back because of what it is.
        most_depth: deepest draft that could still be committed, for whoever adds to a drafter's proposal.
        ahead: draft tokens that stand before the first one wanted here; only an :class:`AheadDrafter` is given any.
        prediction: a text that the output may largely repeat.
        drafter: which of a portfolio's drafters is asked (:mod:`outrider.drafters.portfolio`); all others ignore it.
    """

    sequence: int
    tokens: Sequence[int]
    num_draft_tokens: int
    mode: DraftMode
    params: SamplingParams
    seed: int
    choice: int
    grammar: GrammarMatcher | None = None
    most_depth: int = 0
    ahead: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
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
class AheadDrafter(Protocol):
    """A drafter of deterministic candidates that can also draft behind tokens which are not committed yet (``ahead``)."""

    reads_ahead: bool


@runtime_checkable
class DrafterWithPath(Protocol):
    """A drafter whose own passes run on one of several paths; results say which.

    Attributes:
        path: which code, and the precision: ``native-amx int8``, ``pytorch bfloat16``.
    """

    path: str


@runtime_checkable
class DrafterWithMemory(Protocol):
    """A drafter that keeps keys, values or hidden states of each sequence, which a memory budget must count."""

    def memory_bytes(self, num_tokens: int) -> int:
        """Most bytes that a sequence of ``num_tokens`` tokens takes."""
        ...

    def suspend(self, sequence: int) -> None:
        """The sequence is put back for a while: give its memory back."""
        ...

    def resume(self, sequence: int, tokens: Sequence[int]) -> None:
        """It is read again, with what it has committed since its start; a :class:`TapDrafter`'s taps follow anew."""
        ...


@runtime_checkable
class SharingDrafter(Protocol):
    """A drafter that remembers finished sequences and drafts from them for others.

    How fast a draft is accepted shows what others have said, so only sequences of one scope may learn from each other.
    """

    def assign(self, sequence: int, scope: str | None) -> None:
        """Called before ``start``: which scope the sequence belongs to; ``None`` is a scope like any other."""
        ...


@runtime_checkable
class CompositeDrafter(Protocol):
    """A drafter that is made of others, and passes on to them what it is told.

    Attributes:
        parts: those others; what they keep in memory, and whom they learn from, is arranged with them directly.
    """

    parts: tuple[Drafter, ...]


def parts_of(drafter: Drafter | None) -> list[Drafter]:
    """The drafters that are not made of others: of which this one is made, or this one itself."""
    if drafter is None:
        return []
    if isinstance(drafter, CompositeDrafter):
        return [leaf for part in drafter.parts for leaf in parts_of(part)]
    return [drafter]


@runtime_checkable
class LawDrafter(Protocol):
    """A drafter of chains that can say what it would have drafted along a text that is already there.

    Texts that the target has said can then be scored without decoding them again (:mod:`outrider.measure.replay`).

    Attributes:
        vocabulary: which tokens the columns of its logits are.
        is_start_free: True if its law at a place depends on the text before it alone, not on where drafting began.
    """

    vocabulary: DraftVocabulary
    is_start_free: bool

    def most_drafts(self, num_tokens: int) -> int:
        """Most draft tokens behind a text of so many tokens, whatever is asked for."""
        ...

    def logits_along(self, requests: Sequence[DraftRequest], continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        """Draft logits ``[K, U]`` of each request: of its first draft token, then behind each continuation token in turn.

        Args:
            requests: texts that were started and observed.
            continuations: K tokens each, taken for the drafts; the last of them is not read.

        Returns:
            K rows each; fewer where the drafter's window ends.
        """
        ...


@runtime_checkable
class ModelDrafter(Protocol):
    """A drafter that runs passes of a model, which are worth timing and planning. All others are taken for cheap.

    Attributes:
        cost_key: what its passes' times depend on: shape, precision, path; tables of times are kept by it.
        nodes_per_level: draft nodes for each level of depth, 1 for chains.
        levels: levels of depth that run its model and grow its tree; deeper drafts cost neither time nor rows.
        deepest: most levels that it ever drafts.
        card_rates: of the drafts at each depth that verification arrived at, the share that was kept when the drafter was
            evaluated; empty where nobody knows.
    """

    cost_key: str
    nodes_per_level: float
    levels: int
    deepest: int
    card_rates: tuple[float, ...]

    def backlog(self, sequence: int, num_tokens: int) -> int:
        """Rows that it would have to read before it can draft behind a sequence of ``num_tokens`` committed tokens."""
        ...
