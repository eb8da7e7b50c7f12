"""Drafters and their arms: which lengths and shapes each is tried with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.drafters.base import Drafter, DrafterWithPath
from outrider.drafters.suffix import SuffixDrafter
from outrider.measure.record import Arm
from outrider.measure.replay import tree_shape
from outrider.sampling.params import SamplingParams

__all__ = ["Contender", "arms_of", "described", "remembers_answers"]


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter, as it was asked for, and its arms by length."""

    spec: str
    drafter: Drafter
    arms: dict[int, Arm]

    @property
    def watched(self) -> int:
        """The length whose passes are shown as samples."""
        return max(self.arms)


def arms_of(
    spec: str, drafter: Drafter, lengths: Sequence[int], sampling: SamplingParams, verification: str, *, label: str = ""
) -> dict[int, Arm]:
    """One arm for each length; a drafter with a tree shape of its own has one, with the largest.

    Args:
        spec: how the drafter was asked for. drafter: what that came to.
        lengths: most draft tokens of a step.
        sampling, verification: of the requests.
        label: short name of the drafter.
    """
    by_what = "rejection" if verification == "auto" else "compare"
    if sampling.is_greedy:
        by_what = "greedy"
    elif sampling.seed is not None:
        by_what = "seeded"
    shape = tree_shape(drafter)
    tried = sorted(set(lengths)) if shape is None else [max(lengths)]
    word = "nodes" if isinstance(drafter, SuffixDrafter) and drafter.width > 1 and drafter.rule == "tree" else "chain"
    labels = {k: f"{word} {k}" for k in tried}
    if shape is not None:
        labels = dict.fromkeys(tried, f"tree depth={shape.depth} width={shape.width} num_nodes={shape.num_nodes}")
    return {
        k: Arm(
            drafter=spec,
            shape=labels[k],
            num_draft_tokens=k,
            temperature=sampling.temperature,
            verification=by_what,
            label=label,
        )
        for k in tried
    }


def remembers_answers(drafter: Drafter) -> bool:
    """True if what the drafter proposes depends on earlier requests' answers."""
    return isinstance(drafter, SuffixDrafter) or isinstance(getattr(drafter, "suffix", None), SuffixDrafter)


def described(drafter: Drafter) -> dict[str, Any]:
    """What a result says of a drafter, as JSON values."""
    found: dict[str, Any] = {"name": drafter.name}
    if isinstance(drafter, DrafterWithPath):
        found["path"] = drafter.path
    model = getattr(drafter, "model", None)
    if model is not None:
        found |= {"fingerprint": model.spec.fingerprint, "precision": model.spec.precision}
    return found
