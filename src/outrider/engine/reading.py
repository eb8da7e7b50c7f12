"""Reading texts into the cache a part at a time, beside whatever else a pass does.

A text is read whole, its last token too: that row's law gives the next token. So a new prompt and a sequence that was put
back are read alike, and neither needs a pass of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.engine.queue import Ticket
from outrider.engine.sequence import LiveSequence
from outrider.engine.taps import joined_taps, tap_reader
from outrider.models.base import Segment

__all__ = ["Chunk", "share_out", "teach"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of a ticket's text that one pass reads.

    Attributes:
        ticket: whose text it is.
        tokens: the part; its first token has position ``start``.
        is_last: nothing is left to read behind it.
    """

    ticket: Ticket
    tokens: list[int]
    start: int
    is_last: bool

    @property
    def sequences(self) -> list[LiveSequence]:
        """Who takes a token from the law behind the last row."""
        return self.ticket.sequences if self.is_last else []


def share_out(tickets: Sequence[Ticket], num_tokens: int) -> list[Chunk]:
    """Parts of at most ``num_tokens`` tokens in all, for the first tickets."""
    chunks = []
    for ticket in tickets:
        size = min(num_tokens, ticket.num_unread)
        if size == 0:
            break
        start, num_tokens = ticket.num_read, num_tokens - size
        part = ticket.tokens[start : start + size]
        chunks.append(Chunk(ticket=ticket, tokens=part, start=start, is_last=size == ticket.num_unread))
    return chunks


def teach(
    drafter: Drafter | None, chunks: Sequence[Chunk], segments: Sequence[Segment], taps: Mapping[int, Tensor]
) -> None:
    """Give a drafter that reads taps those of the chunks' rows, which all choices of a request share.

    Args:
        drafter: does nothing unless it is a :class:`outrider.drafters.base.TapDrafter`.
        chunks: what the pass read; segments: its rows of each.
        taps: of the pass, all rows.
    """
    reader = tap_reader(drafter) if chunks else None
    if reader is None:
        return
    taps_RD = joined_taps(taps, reader.taps)
    for chunk, segment in zip(chunks, segments, strict=True):
        rows_RD = taps_RD[segment.start : segment.start + segment.num_rows]
        for sequence in chunk.ticket.sequences:
            reader.absorb(sequence.key, chunk.start, rows_RD)
