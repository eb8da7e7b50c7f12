"""What a verifier is handed: the processed law of the target at the nodes of a step, and keyed noise.

Verification walks each proposal from its root, level by level, for the whole batch at once: at a level every sequence
that is still walking stands at one node. Only laws of nodes that were arrived at are ever processed, and the history that
penalties see is exactly the path walked (law 1). The exact-law tests hand in laws and noise of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Chooses", "GreedyTokens", "Place", "StepLaws"]


class Place(NamedTuple):
    """A node that a walk stands at.

    Attributes:
        sequence: index of the sequence in the step.
        node: index of the node in its proposal, ``ROOT`` (-1) for the root.
        path: draft tokens from the root to this node, itself included; empty at the root.
    """

    sequence: int
    node: int
    path: tuple[int, ...]


class Chooses(Protocol):
    """Says which token the target takes at any node of a step."""

    def choose(self, places: Sequence[Place]) -> list[int]:
        """Draw the next token from the target's processed law at each place (greedy: the argmax, ties to the lowest id).

        The noise is that of the token's absolute position, so siblings' laws share it.
        """
        ...


class GreedyTokens:
    """The choices of sequences that take the argmax of the raw logits, known for every row before any walk begins.

    Args:
        tokens: the argmax of each row of the pass.
        first_rows: the root row of each sequence; node i's row is i + 1 behind it.
    """

    def __init__(self, tokens: Sequence[int], first_rows: Sequence[int]) -> None:
        self._tokens = tokens
        self._first_rows = first_rows

    def behind(self, sequence: int, num_nodes: int) -> Sequence[int]:
        """The token behind the root of a sequence's proposal, then behind each of its nodes in order."""
        first = self._first_rows[sequence]
        return self._tokens[first : first + num_nodes + 1]


class StepLaws(Chooses, Protocol):
    """The target's processed law and keyed noise at any node of a step."""

    def probs_BV(self, places: Sequence[Place]) -> Tensor:
        """The processed law at each place, ``[len(places), V]``, float32 or float64, rows summing to 1."""
        ...

    def uniforms(self, places: Sequence[Place]) -> list[float]:
        """Acceptance uniforms in (0, 1) for the token that follows each place."""
        ...

    def draw_from(self, weights_BV: Tensor, places: Sequence[Place]) -> list[int]:
        """Draw from unnormalised residual laws with noise of their own (never that of ``choose`` or of drafting)."""
        ...
