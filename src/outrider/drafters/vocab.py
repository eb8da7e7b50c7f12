"""Do a draft model and its target speak the same tokens?"""

from __future__ import annotations

from typing import Protocol

from outrider.errors import VocabularyMismatch
from outrider.models.base import TargetSpec
from outrider.models.tokenizer import Tokenizer

__all__ = ["check_vocabulary"]


class _Model(Protocol):
    @property
    def spec(self) -> TargetSpec: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


def check_vocabulary(draft: _Model, target: _Model) -> None:
    """Make sure that every token of the target is the same token in the draft model.

    The draft model may know more tokens, or be padded to more rows: those are never proposed.

    Raises:
        VocabularyMismatch: names the first token id that differs.
    """
    if draft.tokenizer is not None and target.tokenizer is not None:
        _compare_tokens(draft, draft.tokenizer, target, target.tokenizer)
        needed = target.tokenizer.vocab_size
    else:
        needed = target.spec.vocab_size
    if draft.spec.vocab_size < needed:
        raise VocabularyMismatch(
            f"draft model {draft.spec.name} has {draft.spec.vocab_size} tokens, target {target.spec.name} {needed}: "
            f"token id {draft.spec.vocab_size} is the first that the draft model lacks; "
            "give a draft model with the target's tokenizer"
        )


def _compare_tokens(draft: _Model, draft_tokens: Tokenizer, target: _Model, target_tokens: Tokenizer) -> None:
    if draft_tokens.vocabulary_hash() == target_tokens.vocabulary_hash():
        return
    for token in range(target_tokens.vocab_size):
        theirs = draft_tokens.piece(token, skip_special_tokens=False)
        ours = target_tokens.piece(token, skip_special_tokens=False)
        if theirs != ours:
            raise VocabularyMismatch(
                f"token id {token} is {draft_tokens.token_text(token)!r} in draft model {draft.spec.name} "
                f"and {target_tokens.token_text(token)!r} in target {target.spec.name}; "
                "give a draft model with the target's tokenizer"
            )
