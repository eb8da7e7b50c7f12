"""Answers to look at: which of their tokens were drafted and kept, which the target chose itself, what was refused."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.measure.record import Piece, PieceKind
from outrider.measure.tally import Mark
from outrider.models.tokenizer import Detokenizer, Tokenizer

__all__ = ["pieces_of"]

_LONGEST = 400
"""Output tokens of a sample: enough to look at."""


def pieces_of(output: Sequence[int], marks: Sequence[Mark], tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """The output in runs of one kind. Refused tokens stand before the one token that replaced them, a run of its own."""
    runs: list[tuple[PieceKind, list[int]]] = []

    def add(kind: PieceKind, tokens: Sequence[int]) -> None:
        is_correction = len(runs) > 1 and runs[-2][0] == "refused"
        if tokens and runs and runs[-1][0] == kind and not is_correction:
            runs[-1][1].extend(tokens)
        elif tokens:
            runs.append((kind, list(tokens)))

    add("target", output[: marks[0].start] if marks else output[:_LONGEST])
    for mark in marks:
        if mark.start > _LONGEST:
            break
        end = mark.start + mark.num_kept
        add("kept", output[mark.start : end])
        add("refused", mark.refused)
        add("target", output[end : mark.start + mark.num_committed])
    reader = Detokenizer(tokenizer)  # a character may lie across two runs
    return tuple(
        Piece(text=tokenizer.decode(tokens) if kind == "refused" else reader.add(tokens), kind=kind)
        for kind, tokens in runs
    )
