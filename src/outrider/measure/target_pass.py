"""A text through the target, once: what the target would have said at each place, and its taps.

Rows of the output's places are read in chunks; logits become a choice or a probability and are forgotten::

    row             prompt[-1]  output[0]  output[1] ...
    gives law of    output[0]   output[1]  output[2] ...

Only a text that this target draws under these settings says anything about how drafters fare on it. At temperature 0, and
with a seed, the target's choice is a fixed function of the text, so text and choices are compared. Without a seed there is
nothing to compare with: what this project's answers say of their making is believed, everything else is off-policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.cache.base import Cache
from outrider.measure.answers import AnsweredText
from outrider.models.base import PackedRows, Target
from outrider.sampling.laws import ProcessedLaws
from outrider.sampling.state import SamplingState
from outrider.types import ROOT
from outrider.verify.base import Place

__all__ = ["MIN_AGREEMENT", "ReadText", "read_text"]

MIN_AGREEMENT = 0.97
"""Share of its tokens that the target itself must choose for a text to count as its own. Ties in low precision and the last
token of a text that was cut account for the rest; text of other models agrees in half to nine tenths of its tokens."""
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """A text, and what the target says of it.

    Attributes:
        text: the text.
        agreement: share of output tokens that are the target's own choice; ``None`` where the choice is not known.
        target_probs: for output drawn without a seed, the processed law's probability of each output token; else empty.
        taps: hidden states of every token but the last, by layer, ``[R, D]``.
        is_on_policy: whether the text may be judged by.
    """

    text: AnsweredText
    agreement: float | None
    target_probs: tuple[float, ...]
    taps: Mapping[int, Tensor]
    is_on_policy: bool


@torch.inference_mode()
def read_text(target: Target, text: AnsweredText, layers: Sequence[int] = ()) -> ReadText:
    """One parallel pass over a text (in chunks).

    Args:
        target: the model. text: at least one output token.
        layers: taps to keep, by layer.
    """
    cache = target.new_cache()
    slot = cache.allocate(len(text.tokens))
    agreeing = 0
    probs: list[float] = []
    taps: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for chunk in _chunks(text):
        judged = _judge(target, cache, slot, text, chunk, layers)
        agreeing += judged.num_agreeing
        probs += judged.probs
        for layer, pieces in taps.items():
            pieces.append(judged.taps[layer])
    cache.free(slot)
    has_choice = text.params.is_greedy or text.params.seed is not None
    agreement = agreeing / len(text.output) if has_choice else None
    return ReadText(
        text=text,
        agreement=agreement,
        target_probs=tuple(probs),
        taps={layer: torch.cat(pieces) for layer, pieces in taps.items()},
        is_on_policy=_is_on_policy(target, text, agreement, agreeing, probs),
    )


def _is_on_policy(
    target: Target, text: AnsweredText, agreement: float | None, agreeing: int, probs: Sequence[float]
) -> bool:
    if text.is_generated:  # rounding may have let it choose otherwise in another batch; it is its own all the same
        return True
    if agreement is not None:
        return agreement >= MIN_AGREEMENT or agreeing + 1 >= len(text.output)
    return min(probs) > 0 and _says_it_is_ours(target, text)


def _says_it_is_ours(target: Target, text: AnsweredText) -> bool:
    """True if the log names these very weights and sampling fields."""
    sampling = text.settings.get("sampling")
    if text.settings.get("fingerprint") != target.spec.fingerprint or not isinstance(sampling, Mapping):
        return False
    ours = asdict(text.params)
    names = [name for name in ours if name not in ("n", "logprobs", "logprobs_mode", "max_tokens", "seed")]
    return all(_plain(sampling.get(name)) == _plain(ours[name]) for name in names)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows ``start .. end`` of a text; the law of ``output[first_output]`` lies behind row ``start + first_row``."""

    start: int
    end: int
    first_row: int
    first_output: int

    @property
    def num_laws(self) -> int:
        return self.end - self.start - self.first_row


@dataclass(frozen=True, slots=True)
class _Judged:
    num_agreeing: int
    probs: list[float]
    taps: Mapping[int, Tensor]


def _chunks(text: AnsweredText) -> Iterator[_Chunk]:
    num_prompt, last = len(text.prompt), len(text.tokens) - 1
    for start in range(0, last, _CHUNK):
        end = min(start + _CHUNK, last)
        first_row = min(max(num_prompt - 1 - start, 0), end - start)
        yield _Chunk(start, end, first_row, start + first_row + 1 - num_prompt)


def _judge(
    target: Target, cache: Cache, slot: int, text: AnsweredText, chunk: _Chunk, layers: Sequence[int]
) -> _Judged:
    rows = PackedRows.pack(
        [text.tokens[chunk.start : chunk.end]],
        slots=[slot],
        starts=[chunk.start],
        device=target.spec.device,
        logit_rows=tuple(range(chunk.first_row, chunk.end - chunk.start)),
    )
    said = text.output[chunk.first_output : chunk.first_output + chunk.num_laws] if chunk.num_laws else ()
    state = _state_before(target, text, max(chunk.first_output, 0))
    if state.is_plain_greedy or not said:
        greedy = target.forward_greedy(rows, cache, taps=layers)
        chosen = greedy.tokens_R.tolist() if said else []
        return _Judged(_agreeing(chosen, said), [], greedy.taps)
    result = target.forward(rows, cache, taps=layers)
    laws = ProcessedLaws(result.logits_RV, first_rows=[0], states=[state])
    places = [Place(sequence=0, node=row + ROOT, path=tuple(said[:row])) for row in range(len(said))]
    if text.params.is_greedy or text.params.seed is not None:
        return _Judged(_agreeing(laws.choose(places), said), [], result.taps)
    return _Judged(0, _probs(laws, places, said), result.taps)


def _probs(laws: ProcessedLaws, places: Sequence[Place], said: Sequence[int]) -> list[float]:
    found: list[float] = []
    for start in range(0, len(places), 16):
        some = places[start : start + 16]
        probs_BV = laws.probs_BV(some)
        tokens_B1 = torch.tensor(said[start : start + 16], device=probs_BV.device).unsqueeze(1)
        found += probs_BV.gather(1, tokens_B1).squeeze(1).tolist()
    return found


def _state_before(target: Target, text: AnsweredText, num_output: int) -> SamplingState:
    spec = target.spec
    state = SamplingState(
        text.params,
        prompt_tokens=text.prompt,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        seed=text.seed,
        choice=0,
    )
    state.commit(text.output[:num_output])
    return state


def _agreeing(chosen: Sequence[int], said: Sequence[int]) -> int:
    return sum(choice == token for choice, token in zip(chosen, said, strict=True))
