"""Other ways to wire the same head: which layers it reads, what its ids mean, where it is normed, how far it looks back.

Each candidate differs from the present wiring in one thing that people get wrong. Whether it is the right one is not
argued about: it is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from outrider.audit.doctor.anatomy import Parts, recorded_taps
from outrider.drafters.eagle_config import EagleConfig, default_taps

__all__ = ["NO_WINDOW", "Candidate", "Vocabulary", "Wiring", "candidates", "target_ids"]

NO_WINDOW = 1 << 20

Vocabulary = Literal["offsets", "ids", "marked", "offsets twice"]
"""What ``d2t`` holds: offsets (the rule), ids themselves, nothing of use (then ``t2d`` says which tokens), or offsets that
somebody took for ids and made offsets of once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """A head's config, what its ``d2t`` is taken for, and how many entries it looks back at."""

    config: EagleConfig
    vocabulary: Vocabulary = "offsets"
    window: int = NO_WINDOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Another wiring.

    Attributes:
        cause: short name of the mistake. title: the mistake, if this turns out to be the right wiring.
        remedy: what to change.
    """

    cause: str
    title: str
    remedy: str
    wiring: Wiring


def target_ids(parts: Parts, vocabulary: Vocabulary) -> Tensor | None:
    """Target id of each draft id, int64 ``[U]``, under one reading; ``None`` if the tensors do not allow it."""
    d2t, t2d = parts.tensors.get("d2t"), parts.tensors.get("t2d")
    if vocabulary == "marked":
        marked = None if t2d is None else t2d.bool().nonzero().flatten()
        return marked if marked is not None and (d2t is None or len(marked) == len(d2t)) else None
    if d2t is None:
        return None
    places = torch.arange(len(d2t))
    times = {"offsets": 1, "ids": 0, "offsets twice": 2}[vocabulary]
    return d2t.to(torch.int64) + times * places


def candidates(
    parts: Parts, now: Wiring, *, num_layers: int, target_vocab_size: int, looks_like: tuple[int, ...]
) -> Iterator[Candidate]:
    """What else to try.

    Args:
        parts: the folder. now: the present wiring.
        num_layers, target_vocab_size: of the target.
        looks_like: layers whose hidden states resemble those recorded at training, in the order of the taps; or none.
    """
    yield from _as_stored(parts, now)
    yield from _vocabularies(parts, now)
    if now.config.target_vocab_size != target_vocab_size:
        yield _padded(now, target_vocab_size)
    yield from _taps(parts, now, num_layers, looks_like)
    yield from _flags(parts, now)
    if now.window < NO_WINDOW:
        yield Candidate(
            cause="window",
            title=f"The head looks back {now.window} positions, and the texts are longer",
            remedy="leave the drafter's option window out (or raise max_positions in the head's config.json if the head "
            "was trained on longer texts)",
            wiring=replace(now, window=NO_WINDOW),
        )


def _as_stored(parts: Parts, now: Wiring) -> Iterator[Candidate]:
    """What the weights' file says, where config.json was changed behind its back."""
    old = now.config.to_json()
    changed = {name: value for name, value in parts.stored.items() if old[name] != value}
    if not changed:
        return
    cause = (
        "tap_layers"
        if "tap_layers" in changed
        else "norm_flags"
        if any("norm" in name for name in changed)
        else "files"
    )
    said = ", ".join(
        f"{name} is {old[name]!r} in config.json and {value!r} in the weights" for name, value in changed.items()
    )
    yield Candidate(
        cause=cause,
        title=f"The head's two files disagree, and the weights are right: {said}",
        remedy="take config.json and model.safetensors from the same head, or set in config.json what the weights say",
        wiring=replace(now, config=EagleConfig.from_json({**old, **changed}, "the weights' copy of the head's shape")),
    )


_VOCABULARY_TEXTS: Mapping[Vocabulary, tuple[str, str]] = {
    "offsets": ("d2t holds offsets", "store d2t as offsets: target id = draft id + d2t[draft id]"),
    "ids": (
        "d2t holds token ids where offsets belong",
        "store d2t as offsets: subtract 0, 1, 2, ... from the ids that it holds",
    ),
    "offsets twice": (
        "d2t was read as ids: the stored offsets are offsets of offsets",
        "add 0, 1, 2, ... to d2t, and convert the head again with a tool that reads d2t as offsets",
    ),
    "marked": (
        "d2t does not lead to the tokens that t2d marks",
        "make d2t anew from t2d: the marked ids, ascending, less 0, 1, 2, ...",
    ),
}


def _vocabularies(parts: Parts, now: Wiring) -> Iterator[Candidate]:
    for vocabulary, (title, remedy) in _VOCABULARY_TEXTS.items():
        if vocabulary != now.vocabulary and target_ids(parts, vocabulary) is not None:
            yield Candidate(cause="d2t", title=title, remedy=remedy, wiring=replace(now, vocabulary=vocabulary))


def _padded(now: Wiring, size: int) -> Candidate:
    given = now.config.target_vocab_size
    return Candidate(
        cause="vocabulary",
        title=f"The head counts {given} tokens and the target {size}: one of them is padded",
        remedy=f"set head.target_vocab_size to {size}, and cut t2d (and an own embedding) to as many rows, or fill them up",
        wiring=replace(now, config=replace(now.config, target_vocab_size=size)),
    )


def _taps(parts: Parts, now: Wiring, num_layers: int, looks_like: tuple[int, ...]) -> Iterator[Candidate]:
    given, usual = now.config.tap_layers, default_taps(num_layers)
    others = [recorded_taps(parts.info), looks_like, usual]
    others += [tuple(tap + shift for tap in taps) for taps in (given, usual) for shift in (-1, 1)]
    others += [given[::-1], tuple(sorted(given))]
    others += [
        (*given[:place], tap + shift, *given[place + 1 :]) for place, tap in enumerate(given) for shift in (-1, 1)
    ]
    tried = {given}
    for taps in others:
        is_possible = len(set(taps)) == len(taps) == len(given) and all(0 <= tap <= num_layers for tap in taps)
        if not is_possible or taps in tried:
            continue
        tried.add(taps)
        yield Candidate(
            cause="tap_layers",
            title=f"The head reads the hidden states before layers {_listed(given)}; {_listed(taps)} fit"
            f"{_shifted(given, taps)}",
            remedy=f"set head.tap_layers to [{_listed(taps)}] (index i is the state before layer i; SGLang's list counts "
            "one less)",
            wiring=replace(now, config=replace(now.config, tap_layers=taps)),
        )


def _listed(taps: tuple[int, ...]) -> str:
    return ", ".join(map(str, taps))


def _shifted(given: tuple[int, ...], taps: tuple[int, ...]) -> str:
    gaps = {tap - own for own, tap in zip(given, taps, strict=True)}
    return f", {abs(gap)} {'higher' if gap > 0 else 'lower'}" if len(gaps) == 1 and (gap := gaps.pop()) else ""


def _flags(parts: Parts, now: Wiring) -> Iterator[Candidate]:
    shown = parts.by_tensors(now.config)
    if shown != now.config:
        yield _flagged(now, shown)
    for flag in ("norm_before_residual", "norm_output"):
        yield _flagged(now, replace(now.config, **{flag: not getattr(now.config, flag)}))  # type: ignore[arg-type]


def _flagged(now: Wiring, config: EagleConfig) -> Candidate:
    old, new = now.config.to_json(), config.to_json()
    changed = [name for name in old if old[name] != new[name]]
    wrong = ", ".join(f"{name} is {str(old[name]).lower()}" for name in changed)
    right = ", ".join(f"head.{name} to {str(new[name]).lower()}" for name in changed)
    return Candidate(
        cause="norm_flags",
        title=f"{wrong}, and the head was trained with the opposite",
        remedy=f"set {right} in config.json, and say so when the head is converted: engines disagree on the default",
        wiring=replace(now, config=config),
    )
