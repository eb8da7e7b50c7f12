"""Faults that an engine could have, planted inside the running one, so that the audit can show that it sees them.

Nothing in the engine knows of them: while a fault is planted, one function of verification, processing or drafting is
replaced by a broken one, and put back afterwards. Every fault here passes for sound at a glance: it decodes fluent text,
and most make it faster.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError, nearest
from outrider.rng import Purpose, gumbel_at_BK, noise_key
from outrider.sampling.params import SamplingParams
from outrider.types import Proposal, Verdict
from outrider.verify.base import Place, StepLaws

__all__ = ["FAULTS", "Fault", "fault_named", "planted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: short. what: one clause for a reader.
        seam: dotted module, and the name in it that is replaced (``Class.method`` too).
        make: makes the broken function from the sound one.
        fields: sampling fields without which the fault does nothing.
    """

    name: str
    what: str
    seam: tuple[str, str]
    make: Callable[[Any], Any]
    fields: dict[str, float] = field(default_factory=dict)


@contextmanager
def planted(fault: Fault | None) -> Iterator[None]:
    """Run a block with the fault in place."""
    if fault is None:
        yield
        return
    module, path = fault.seam
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    sound = getattr(owner, name)
    setattr(owner, name, fault.make(sound))
    try:
        yield
    finally:
        setattr(owner, name, sound)


def fault_named(name: str) -> Fault:
    """Look a fault up.

    Raises:
        ConfigError: there is none of that name.
    """
    for fault in FAULTS:
        if fault.name == name:
            return fault
    names = [fault.name for fault in FAULTS]
    raise ConfigError(f"fault {name!r} is unknown{nearest(name, names)}; allowed: {', '.join(names)}")


TYPICAL_SHARE, TYPICAL_FLOOR = 0.3, 0.09
"""Thresholds of typical acceptance as Medusa ships them (arXiv 2401.10774): delta and epsilon."""
LOOK_AHEAD = 0.2
"""A draft token less likely than this ends the chain, in the fault that looks ahead."""


def _typical(sound: Any) -> Any:
    """Keep a draft token that is not surprising to the target; correct with a fresh draw."""

    def corrections(
        chains: Sequence[Proposal], level: int, laws: StepLaws, places: Sequence[Place]
    ) -> list[int | None]:
        probs_BV = laws.probs_BV(places)
        entropies = torch.special.entr(probs_BV).sum(dim=-1).tolist()
        tokens = [chain.tokens[level] for chain in chains]
        drawn = laws.draw_from(probs_BV, places)
        floors = [min(TYPICAL_FLOOR, TYPICAL_SHARE * math.exp(-entropy)) for entropy in entropies]
        return [
            None if float(probs_BV[row, token]) > floor else drawn[row]
            for row, (token, floor) in enumerate(zip(tokens, floors, strict=True))
        ]

    return corrections


def _greedy_drafts(sound: Any) -> Any:
    """Hand over the law, and propose its likeliest token instead of a draw."""
    return lambda logits_BV, gumbel_BV: logits_BV.argmax(dim=-1).tolist()


def _correction_from_target(sound: Any) -> Any:
    return lambda target_probs_BV, draft_probs_BV: target_probs_BV


def _one_sided(**neutral: float) -> Callable[[Any], Any]:
    """The rejection test sees the target's law without some fields; the drafts were drawn with them."""

    def make(sound: Any) -> Any:
        def probs_BV(laws: Any, places: Sequence[Place]) -> Tensor:
            with _fields_changed(laws, neutral, lambda place: True):
                probs: Tensor = sound(laws, places)
                return probs

        return probs_BV

    return make


def _forgotten_after_first(**neutral: float) -> Callable[[Any], Any]:
    """Fields are read at the first position of a step only."""

    def make(sound: Any) -> Any:
        def params(laws: Any, places: Sequence[Place]) -> list[SamplingParams]:
            found: list[SamplingParams] = sound(laws, places)
            return [
                replace(each, **neutral) if place.path else each  # type: ignore[arg-type]
                for each, place in zip(found, places, strict=True)
            ]

        return params

    return make


@contextmanager
def _fields_changed(laws: Any, neutral: dict[str, float], where: Callable[[Place], bool]) -> Iterator[None]:
    """Let ``laws`` read other fields at some places."""
    kind = type(laws)
    sound = kind._params

    def params(self: Any, places: Sequence[Place]) -> list[SamplingParams]:
        found: list[SamplingParams] = sound(self, places)
        return [
            replace(each, **neutral) if where(place) else each  # type: ignore[arg-type]
            for each, place in zip(found, places, strict=True)
        ]

    kind._params = params
    try:
        yield
    finally:
        kind._params = sound


def _penalties_forgotten(sound: Any) -> Any:
    """Rows behind a draft token are not penalised."""

    def penalise(logits_BV: Tensor, states: Sequence[Any], paths: Sequence[Sequence[int]]) -> None:
        first = [row for row, path in enumerate(paths) if not path]
        if first:
            rows_BV = logits_BV[first]
            sound(rows_BV, [states[row] for row in first], [paths[row] for row in first])
            logits_BV[first] = rows_BV

    return penalise


class _ReusedNoise:
    """Step laws whose acceptance number is the very uniform that made the draft token win its draw."""

    def __init__(self, laws: Any, proposals: dict[int, Proposal]) -> None:
        self._laws, self._proposals = laws, proposals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._laws, name)

    def uniforms(self, places: Sequence[Place]) -> list[float]:
        tokens = [self._proposals[place.sequence].tokens[place.node + 1] for place in places]
        keys = []
        for place in places:
            state = self._laws._states[place.sequence]
            position = state.num_prompt + state.num_output + len(place.path)
            keys.append(noise_key(state.seed, state.choice, position, Purpose.DRAFT))
        gumbels = gumbel_at_BK(keys, torch.tensor([[token] for token in tokens])).flatten().tolist()
        return [min(max(math.exp(-math.exp(-gumbel)), 1e-16), 1 - 1e-16) for gumbel in gumbels]


def _noise_reused(sound: Any) -> Any:
    def verify_chain(proposals: Sequence[Proposal], laws: Any, sequences: Sequence[int]) -> list[Verdict]:
        known = dict(zip(sequences, proposals, strict=True))
        verdicts: list[Verdict] = sound(proposals, _ReusedNoise(laws, known), sequences)
        return verdicts

    return verify_chain


def _length_by_looking(sound: Any) -> Any:
    """Cut every drawn chain before its first unlikely token, after it was drawn."""

    def propose(member: Any, wishes: Sequence[Any]) -> list[Proposal]:
        proposals: list[Proposal] = sound(member, wishes)
        return [_cut_unlikely(proposal) for proposal in proposals]

    return propose


def _cut_unlikely(proposal: Proposal) -> Proposal:
    if proposal.draft_probs_NV is None:
        return proposal
    for node, token in enumerate(proposal.tokens):
        if float(proposal.draft_probs_NV[node, token]) < LOOK_AHEAD:
            return proposal.truncate(node)
    return proposal


def _wrong_bonus_row(sound: Any) -> Any:
    """The bonus token is drawn from the law of the row before, with that row's history."""

    def choose_bonus(
        proposals: Sequence[Proposal],
        laws: StepLaws,
        sequences: Sequence[int],
        num_kept: Sequence[int],
        next_tokens: list[int],
    ) -> None:
        sound(proposals, laws, sequences, [max(kept - 1, 0) for kept in num_kept], next_tokens)

    return choose_bonus


CHAIN, SELECT, LAWS = "outrider.verify.chain", "outrider.verify.select", "outrider.sampling.laws"

FAULTS = (
    Fault(
        name="typical-acceptance",
        what="drafts are kept where they do not surprise the target",
        seam=(CHAIN, "_corrections"),
        make=_typical,
    ),
    Fault(
        name="greedy-drafts",
        what="drafts are the mode of the law that the acceptance ratio takes them to be drawn from",
        seam=("outrider.drafters.choice", "draw_logits"),
        make=_greedy_drafts,
    ),
    Fault(
        name="target-correction",
        what="corrections are drawn from the target's law instead of the residual",
        seam=(CHAIN, "residual_BV"),
        make=_correction_from_target,
    ),
    Fault(
        name="temperature-one-side",
        what="drafts are drawn at the request's temperature and tested against the target's law at 1",
        seam=(LAWS, "ProcessedLaws.probs_BV"),
        make=_one_sided(temperature=1.0),
    ),
    Fault(
        name="top-p-one-side",
        what="drafts are drawn with top_p and tested against the target's law without it",
        seam=(LAWS, "ProcessedLaws.probs_BV"),
        make=_one_sided(top_p=1.0),
    ),
    Fault(
        name="min-p-forgotten",
        what="min_p is ignored behind the first draft token",
        seam=(LAWS, "ProcessedLaws._params"),
        make=_forgotten_after_first(min_p=0.0),
        fields={"min_p": 0.1},
    ),
    Fault(
        name="penalties-forgotten",
        what="penalties are ignored behind the first draft token",
        seam=(LAWS, "_penalise"),
        make=_penalties_forgotten,
        fields={"repetition_penalty": 1.2},
    ),
    Fault(
        name="noise-reused",
        what="a draft token's acceptance is decided by the noise that drew it",
        seam=(SELECT, "verify_chain"),
        make=_noise_reused,
    ),
    Fault(
        name="length-looks-ahead",
        what="a chain ends before its first drawn token that is unlikely",
        seam=("outrider.engine.drafting", "_with_forced"),
        make=_length_by_looking,
    ),
    Fault(
        name="wrong-bonus-row",
        what="the bonus token is drawn from the row before its own",
        seam=(CHAIN, "_choose_bonus"),
        make=_wrong_bonus_row,
    ),
)
