"""Several drafters behind one: each is told everything, and for each sequence and step one of them is asked.

Which one, the request says (``DraftRequest.drafter``), and whoever fills it in (:mod:`outrider.engine.planner`) knows past
evidence and text alone, never a draft that was drawn: asking two and taking the better draw would bias the output (law 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DrafterWithPath, DraftRequest, TapDrafter
from outrider.errors import ConfigError
from outrider.types import NO_DRAFT, Proposal

__all__ = ["Portfolio", "TapPortfolio", "members_of", "portfolio_of"]


class Portfolio:
    """A :class:`outrider.drafters.base.Drafter` made of several.

    Args:
        members: at least two, of different names.
        name: for reports; each proposal carries its own drafter's name.

    Attributes:
        parts: the members.

    Raises:
        ConfigError: fewer than two members, or two of one name.
    """

    def __init__(self, members: Sequence[Drafter], *, name: str) -> None:
        names = [member.name for member in members]
        if len(names) < 2:
            raise ConfigError(
                f"drafter {name!r} chooses among {len(names)} drafters; give two or more, as auto:suffix,HEAD"
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"drafter {name!r} names a drafter twice; give each once")
        self.name = name
        self.parts = tuple(members)
        self._by_name = dict(zip(names, members, strict=True))

    def start(self, sequence: int, tokens: Sequence[int]) -> None:
        """Tell all."""
        for member in self.parts:
            member.start(sequence, tokens)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Each request's drafter is asked (the first where none is named), all its requests at once."""
        proposals = [NO_DRAFT] * len(requests)
        for member in self.parts:
            mine = [i for i, request in enumerate(requests) if self._asked(request) is member]
            if mine:
                for index, proposal in zip(mine, member.propose([requests[i] for i in mine]), strict=True):
                    proposals[index] = proposal
        return proposals

    def observe(self, sequence: int, tokens: Sequence[int], num_new: int) -> None:
        """Tell all."""
        for member in self.parts:
            member.observe(sequence, tokens, num_new)

    def finish(self, sequence: int) -> None:
        """Tell all."""
        for member in self.parts:
            member.finish(sequence)

    def _asked(self, request: DraftRequest) -> Drafter:
        return self._by_name[request.drafter] if request.drafter else self.parts[0]


class TapPortfolio(Portfolio):
    """A portfolio with members that read hidden states: a :class:`outrider.drafters.base.TapDrafter`.

    Attributes:
        taps: of all members together, each once.
        path: of those members that have one.
    """

    def __init__(self, members: Sequence[Drafter], *, name: str) -> None:
        super().__init__(members, name=name)
        self._readers: list[TapDrafter] = [member for member in members if isinstance(member, TapDrafter)]
        self.taps = tuple(dict.fromkeys(tap for reader in self._readers for tap in reader.taps))
        self.path = ", ".join(member.path for member in members if isinstance(member, DrafterWithPath))

    def absorb(self, sequence: int, start: int, taps_RD: Tensor) -> None:
        """Hand each reader its own taps."""
        for reader in self._readers:
            reader.absorb(sequence, start, taps_RD if reader.taps == self.taps else self._part(reader.taps, taps_RD))

    def _part(self, layers: Sequence[int], taps_RD: Tensor) -> Tensor:
        """Some layers' columns of all."""
        parts = dict(zip(self.taps, taps_RD.chunk(len(self.taps), dim=1), strict=True))
        return torch.cat([parts[layer] for layer in layers], dim=1)


def portfolio_of(members: Sequence[Drafter], *, name: str) -> Portfolio:
    """A portfolio that asks the target for hidden states only if a member reads them."""
    kind = TapPortfolio if any(isinstance(member, TapDrafter) for member in members) else Portfolio
    return kind(members, name=name)


def members_of(drafter: Drafter | None) -> tuple[Drafter, ...]:
    """Who can be asked: a portfolio's members, or the drafter itself."""
    if drafter is None:
        return ()
    return drafter.parts if isinstance(drafter, Portfolio) else (drafter,)
