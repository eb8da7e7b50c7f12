"""What a head's folder says of itself, held against what is found: target, template, tensors, answers, acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.audit.doctor.anatomy import Parts
from outrider.audit.doctor.report import Finding, Status
from outrider.drafters.head_folder import HeadInfo
from outrider.drafters.head_record import answer_statistics, tensor_statistics
from outrider.metrics import SpeculationStats
from outrider.models.base import LoadedTarget

__all__ = ["Card", "answers", "checkpoint", "resembling_layers", "template", "tensors"]

_NO_CARD_TOKENS = 1.3
_WEAK_TOKENS = 1.5
_SAME_DIRECTION = 0.7
_NOISE_EDGE = 1.05
_USUAL_COVERAGE = 0.95

_CHECKPOINT = Finding(
    cause="checkpoint",
    place="head",
    status="not checked",
    title="The head was made for another target",
    evidence="",
    remedy="load the target that it was trained for, or train a head for this one",
)
_TEMPLATE = Finding(
    cause="template",
    place="wiring",
    status="not checked",
    title="Chats are rendered with another template than in training",
    evidence="",
    remedy="give the template and --tool-rendering of the training, or train with the ones that are served",
    weight=65,
)
_THINKING = Finding(
    cause="thinking",
    place="wiring",
    status="not checked",
    title="The answers think otherwise than in training",
    evidence="",
    remedy="switch the template's thinking mode to that of the training, or train on answers in this mode",
    weight=66,
)
_TENSORS = Finding(
    cause="tensors",
    place="head",
    status="not checked",
    title="Tensors are random, or not those that were trained",
    evidence="",
    remedy="fetch or convert the head again, or train it for longer",
    weight=90,
)
_TRAFFIC = Finding(
    cause="traffic",
    place="traffic",
    status="not checked",
    title="Language or domain is not that of the training",
    evidence="",
    remedy="train the head on this traffic (outrider train eagle3), or send this traffic without it",
    weight=50,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The acceptance that a head was measured at when it was trained, for chains of some length.

    Attributes:
        tokens: tokens a pass; ``None`` if the folder does not say.
    """

    tokens: float | None

    @staticmethod
    def of(info: HeadInfo, num_draft_tokens: int) -> Card:
        """Read it; for chains shorter than the measured ones, from the shares kept at each depth."""
        tokens, depths = info.acceptance.get("tokens_per_pass"), info.acceptance.get("kept_at_depth")
        if not isinstance(tokens, int | float):
            return Card(tokens=None)
        if isinstance(depths, list) and num_draft_tokens < len(depths):
            return Card(tokens=1 + sum(depths[:num_draft_tokens]))
        return Card(tokens=float(tokens))

    def is_missed(self, found: Sequence[SpeculationStats]) -> bool:
        """True if the upper end of what was found here (99 %, over requests) lies below the card."""
        counts = np.array([[each.committed, each.passes] for each in found])
        drawn = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
        sums = np.maximum(counts[drawn].sum(axis=1), 1)
        upper = float(np.percentile(sums[:, 0] / sums[:, 1], 99.5))
        return upper < (_NO_CARD_TOKENS if self.tokens is None else self.tokens - 0.02)

    def weakness(self, tokens: float, speed_up: float | None) -> Finding:
        """A head that does what its card says, and that is little."""
        promised = tokens if self.tokens is None else self.tokens
        is_weak = max(tokens, promised) < _WEAK_TOKENS and (speed_up is None or speed_up < 1.2)
        says = "has no measured acceptance to compare with" if self.tokens is None else f"says {self.tokens:.2f}"
        return Finding(
            cause="weak_head",
            place="head",
            status="seen" if is_weak else "clear",
            title="The head foresees little, here as in its training",
            evidence=f"{tokens:.2f} tokens a pass; its card {says}",
            remedy="train on more of your traffic and for longer (outrider train eagle3), with answers of this target",
            weight=40,
        )


def checkpoint(info: HeadInfo, target: LoadedTarget, live: Mapping[int, Mapping[str, Any]], *, is_low: bool) -> Finding:
    """Was the head made for this very target?

    Args:
        info: the head's. target: the present one.
        live: statistics of the target's hidden states by layer (:func:`outrider.drafters.head_record.tap_statistics`).
        is_low: there is a loss to explain.
    """
    spec = target.spec
    agreement = _directions(info, live)
    words = (
        ""
        if agreement is None
        else f"; directions of its hidden states agree with those at training to {agreement:.2f}"
    )
    if not info.target_fingerprint:
        return replace(_CHECKPOINT, evidence=f"the folder names no fingerprint{words}")
    if info.target_fingerprint == spec.fingerprint:
        return replace(_CHECKPOINT, status="clear", evidence=f"same fingerprint{words}")
    return replace(
        _CHECKPOINT,
        status=_status(True, is_low),
        evidence=f"it was trained for {info.target_name} with fingerprint {info.target_fingerprint}; this is {spec.name} "
        f"with {spec.fingerprint}{words}",
        weight=85 if agreement is not None and agreement < _SAME_DIRECTION else 70,
    )


def _directions(info: HeadInfo, live: Mapping[int, Mapping[str, Any]]) -> float | None:
    """The least cosine over the taps, recorded against live."""
    cosines = []
    for name, recorded in info.hidden_statistics.items():
        layer = name.removeprefix("tap ")
        known = recorded.get("direction") if isinstance(recorded, Mapping) else None
        if layer.isdecimal() and int(layer) in live and known:
            cosines.append(_cosine(known, live[int(layer)]["direction"]))
    return min(cosines, default=None)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    a, b = torch.tensor(one), torch.tensor(other)
    return float((a @ b) / (a.norm() * b.norm()).clamp_min(1e-12))


def resembling_layers(info: HeadInfo, live: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """For each recorded tap the layer whose hidden states resemble it most; empty if nothing to compare was recorded."""
    found = []
    for recorded in info.hidden_statistics.values():
        if isinstance(recorded, Mapping) and recorded.get("direction") and recorded.get("norm_median"):
            found.append(min(live, key=lambda layer, known=recorded: _distance(known, live[layer])))  # type: ignore[misc]
    return tuple(found)


def _distance(recorded: Mapping[str, Any], live: Mapping[str, Any]) -> float:
    ratio = max(live["norm_median"], 1e-9) / max(recorded["norm_median"], 1e-9)
    return abs(math.log(ratio)) + 1 - _cosine(recorded["direction"], live["direction"])


def template(info: HeadInfo, target: LoadedTarget, texts: Sequence[str], *, is_low: bool) -> list[Finding]:
    """Are chats rendered as in training, and do answers think as they did?"""
    now = "" if target.tokenizer is None else target.tokenizer.template_hash
    if target.tokenizer is None or not info.template_hash:
        first = replace(_TEMPLATE, evidence="the folder, or the target, names no template")
    elif info.template_hash == now:
        first = replace(_TEMPLATE, status="clear", evidence=f"template {now}, as in training")
    elif target.tokenizer.is_same_template(info.template_hash):
        said = f"template {now}; in training the same, but for who renders tools (--tool-rendering)"
        first = replace(_TEMPLATE, status="clear", evidence=said)
    else:
        first = replace(
            _TEMPLATE,
            status=_status(True, is_low),
            evidence=f"trained with template {info.template_hash}, rendered with {now} (special tokens and the rendering of "
            "tools count)",
        )
    trained = _recorded_answers(info).get("thinking")
    if not texts or not isinstance(trained, int | float):
        return [first]
    here = sum("<think>" in text for text in texts) / len(texts)
    said = f"{100 * trained:.0f} % of the training answers held a thought, {100 * here:.0f} % of these do"
    return [first, replace(_THINKING, status=_status(abs(here - trained) >= 0.5, is_low), evidence=said)]


def tensors(parts: Parts, *, is_low: bool) -> Finding:
    """Are the tensors those that were trained?"""
    wrong = [*(f"{name} is missing" for name in parts.missing), *(f"{name} is not finite" for name in parts.broken)]
    if wrong:
        wrong += [f"{name} is unknown" for name in parts.unknown]
        return replace(
            _TENSORS,
            status="refused",
            title="Tensors are missing, renamed or broken",
            evidence=f"{parts.folder}: {'; '.join(wrong[:6])}{_renames(parts)}",
            remedy="fetch or convert the head again; a loader that passes over a missing tensor runs it with random numbers",
        )
    changed = _changed(parts)
    if changed:
        said = f"not as they were when the head was saved: {'; '.join(changed[:4])}"
        return replace(_TENSORS, status=_status(True, is_low), evidence=said)
    noise = [] if "tensors" in parts.info.record else _noise(parts)
    if noise:
        said = f"as even as random numbers, no direction stands out: {', '.join(noise[:6])}"
        return replace(_TENSORS, status=_status(True, is_low), evidence=said, weight=75)
    return replace(
        _TENSORS, status="clear", evidence=f"{len(parts.tensors)} tensors, as recorded or with clear structure"
    )


def _renames(parts: Parts) -> str:
    pairs = "; ".join(f"{name} lies there as {other}" for name, other in parts.renamed.items())
    return f" ({pairs})" if pairs else ""


def _changed(parts: Parts) -> list[str]:
    recorded = parts.info.record.get("tensors")
    if not isinstance(recorded, Mapping):
        return []
    lines = []
    for name, now in tensor_statistics(parts.tensors).items():
        then = recorded.get(name)
        if then is None:
            continue
        is_other = abs(now["rms"] - then["rms"]) > 0.02 * then["rms"] or abs(now["sketch"] - then["sketch"]) > 0.1
        if is_other:
            lines.append(
                f"{name} (root mean square {now['rms']:.4g} instead of {then['rms']:.4g}, sketch {now['sketch']:.2f} instead "
                f"of {then['sketch']:.2f})"
            )
    return lines


def _noise(parts: Parts) -> list[str]:
    """Matrices whose largest singular value is no larger than that of independent random numbers of their variance."""
    matrices = {
        n: t.float() for n, t in parts.tensors.items() if t.dim() == 2 and t.is_floating_point() and "embed" not in n
    }
    return [name for name, matrix in matrices.items() if _largest(matrix) < _NOISE_EDGE * _edge(matrix)]


def _edge(matrix: Tensor) -> float:
    rows, columns = matrix.shape
    return float(matrix.std()) * (math.sqrt(rows) + math.sqrt(columns))


def _largest(matrix: Tensor) -> float:
    """Largest singular value, by power iteration from a fixed start."""
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0))
    for _ in range(30):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm().clamp_min(1e-30)
    return float((matrix @ vector).norm())


def answers(
    info: HeadInfo, tokens: Sequence[Sequence[int]], texts: Sequence[str], draft_ids: Tensor | None, *, is_low: bool
) -> Finding:
    """Are these answers like those that the head was trained on?

    Args:
        info: the head's. tokens, texts: the target's answers to the requests. draft_ids: what the head can say.
        is_low: there is a loss to explain.
    """
    if draft_ids is None:
        return replace(_TRAFFIC, evidence="the head has no draft vocabulary")
    then = _recorded_answers(info)
    known = then.get("common_ids", ())
    now = answer_statistics(tokens, texts, draft_ids=draft_ids.tolist(), common_ids=known)
    trained = float(then.get("covered", info.data.get("draft vocabulary covers", _USUAL_COVERAGE)))
    is_other = now["covered"] < trained - 0.1
    words = [
        f"{_percent(now['covered'])} of the answers' tokens are in the draft vocabulary (training: {_percent(trained)})"
    ]
    if known:
        is_other = is_other or now["common"] < 0.6 * then["common"]
        words.append(
            f"{_percent(now['common'])} are among the {len(known)} commonest of the training answers "
            f"(training: {_percent(then['common'])})"
        )
    if texts and then.get("scripts"):
        words.append(f"letters: {_scripts(now['scripts'])} (training: {_scripts(then['scripts'])})")
    return replace(_TRAFFIC, status=_status(is_other, is_low), evidence="; ".join(words))


def _status(is_other: bool, is_low: bool) -> Status:
    """A difference is a cause only where there is a loss."""
    if not is_other:
        return "clear"
    return "seen" if is_low else "noted"


def _recorded_answers(info: HeadInfo) -> Mapping[str, Any]:
    found = info.record.get("answers", {})
    return found if isinstance(found, Mapping) else {}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _scripts(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_percent(share)}" for name, share in list(shares.items())[:3]) or "none"
