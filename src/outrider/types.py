"""The words of the project as data: what a drafter proposes, what a verifier decides, what one step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

__all__ = ["NO_DRAFT", "ROOT", "DraftMode", "FinishReason", "Proposal", "StepReport", "TokenLogprobs", "Verdict"]

ROOT = -1
"""Index of the root of every proposal: the last committed token. Not a draft token itself."""


class DraftMode(StrEnum):
    """How a drafter that has a law of its own must choose tokens (laws 5 to 7).

    ``GREEDY``  the most probable tokens; deterministic candidates, verified by draw-and-compare.
    ``SHARED``  drawn with the very Gumbel noise that verification will use at that position; draw-and-compare.
    ``DRAWN``   drawn with the drafter's own noise, and the law is handed over; verified by rejection.
    """

    GREEDY = "greedy"
    SHARED = "shared"
    DRAWN = "drawn"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Draft tokens, their tree, and the law they were drawn from.

    Attributes:
        tokens: the N draft tokens, parents before children, siblings in the order they are to be tried.
        parents: for each node the index of its parent node, ``ROOT`` (-1) for a child of the last committed token.
        draft_probs_NV: law that each node was drawn from, over the *target* vocabulary, ``[N, V]``; ``None`` when the
            tokens are deterministic candidates (or share the verifier's noise) and are verified by draw-and-compare.
        drafter: name of the drafter, for reports.
        scores: for each node the logarithm of the drafter's estimate that it is kept, never more than its parent's; only
            of deterministic candidates, which may be left out by it (law 6). ``None`` where the drafter has no opinion.
            Proposals that differ in nothing else are equal.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    draft_probs_NV: Tensor | None = None
    drafter: str = ""
    scores: tuple[float, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), (self.tokens, self.parents)
        assert self.is_chain or all(ROOT <= parent < node for node, parent in enumerate(self.parents)), self.parents
        if self.draft_probs_NV is not None:
            assert self.is_chain, "only single chains may be drawn"
            assert self.draft_probs_NV.shape[0] == len(self.tokens)
            assert self.scores is None, "a drawn token is never left out for what it is"
        assert self.scores is None or len(self.scores) == len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if every node's parent is the node before it."""
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        if self.is_chain:
            return tuple(range(1, len(self.parents) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def children(self, node: int) -> tuple[int, ...]:
        """Children of ``node`` (or of ``ROOT``) in the order in which they are tried."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)

    def truncate(self, num_nodes: int) -> Proposal:
        """The first ``num_nodes`` nodes. Only for cuts that do not look at the tokens (law 5)."""
        if num_nodes >= len(self):
            return self
        probs = None if self.draft_probs_NV is None else self.draft_probs_NV[:num_nodes]
        return Proposal(
            tokens=self.tokens[:num_nodes],
            parents=self.parents[:num_nodes],
            draft_probs_NV=probs,
            drafter=self.drafter,
            scores=None if self.scores is None else self.scores[:num_nodes],
        )

    def only(self, nodes: Sequence[int]) -> Proposal:
        """These nodes alone, ascending, the parent of each among them. Deterministic candidates only (law 6)."""
        assert self.draft_probs_NV is None, "a drawn token is never left out for what it is"
        if len(nodes) == len(self):
            return self
        index = {node: place for place, node in enumerate(nodes)} | {ROOT: ROOT}
        return Proposal(
            tokens=tuple(self.tokens[node] for node in nodes),
            parents=tuple(index[self.parents[node]] for node in nodes),
            drafter=self.drafter,
            scores=None if self.scores is None else tuple(self.scores[node] for node in nodes),
        )

    @staticmethod
    def chain(tokens: Sequence[int], *, drafter: str = "", draft_probs_NV: Tensor | None = None) -> Proposal:
        """A single chain of draft tokens."""
        return Proposal(
            tokens=tuple(tokens),
            parents=tuple(range(-1, len(tokens) - 1)),
            draft_probs_NV=draft_probs_NV,
            drafter=drafter,
        )


NO_DRAFT = Proposal()
"""The empty proposal: a step with it is plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one step decided for one sequence.

    Attributes:
        path: indices of the kept nodes, root to leaf.
        next_token: the correction token (a draft was refused, or there was none) or the bonus token (all kept).
    """

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One target pass as one sequence saw it. The only thing that ``metrics``, ``measure`` and ``audit`` read.

    Attributes:
        tokens: tokens committed by this pass, after stop rules.
        drafted: draft nodes proposed, less those cut off by a stop or a limit.
        accepted: draft tokens committed.
        reached: for each depth 1.. the 0/1 flag that verification arrived there (a node existed and all before was kept).
        kept: for each depth 1.. the 0/1 flag that a draft token was kept there.
        drafter: who proposed; empty when nobody did.
        draft_ms, verify_ms, other_ms: this sequence's pass: drafting, target pass + verdict, the rest.
        batch_size: sequences that shared the pass; rows: packed rows of the pass.
        prefill_rows: those of ``rows`` that read prompts of other sequences meanwhile.
        planned: deepest draft that the planner allowed; 0 where it wanted none, more than was drafted where the drafter
            had less to say.
        is_prefill: True for the pass that read the prompt; it commits one token that no metric counts. Times and ``rows``
            are those of all passes that read a part of it, tokens taken over from a cached prefix left out.
        is_recomputed: True for a prefill that read the sequence's own output again, after it had been put back for want
            of memory.
    """

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    drafter: str = ""
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    batch_size: int = 1
    rows: int = 1
    prefill_rows: int = 0
    planned: int = 0
    is_prefill: bool = False
    is_recomputed: bool = False
    refused: tuple[int, ...] = field(default=())
    """Draft tokens of the first refused sibling group (for ``--show-drafts``); empty when all were kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one output token and of the likeliest tokens there (the chosen one always included).

    ``top`` is ordered by falling probability, ties by id; natural logarithms.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
