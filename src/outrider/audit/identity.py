"""Proof of identity: the same prompts with and without speculation, compared token by token (laws 3 and 7).

Greedy output, and output with a seed, is a fixed function of the request. So speculation must not change one token. The
one excuse is rounding: a processor adds the products of a row in another order when the pass holds another number of
rows, and where two tokens score almost alike, that can swap them. Such a *tie* is accepted only below a tolerance that is
measured without any speculation: the same texts are decoded plainly, alone and in a batch, and their logits compared.

A difference is explained by teacher forcing: the shared text is read again, row by row as plain decoding reads it, and the
scores of both tokens are compared there. ``tie``: the gap is below the tolerance. ``bug``: it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.audit.control import Control, forced_logits, run_control
from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.engine.request import build_request
from outrider.engine.result import GenerationResult
from outrider.errors import ConfigError
from outrider.metrics import SpeculationStats
from outrider.models.base import Target
from outrider.rng import Purpose, gumbel_BV, noise_key
from outrider.sampling.laws import process_logits
from outrider.sampling.params import SamplingParams
from outrider.sampling.state import SamplingState
from outrider.sampling.warp import warp_logits

__all__ = [
    "ArmReport",
    "Control",
    "Difference",
    "IdentityReport",
    "audit_identity",
    "explain",
    "first_difference",
    "forced_logits",
    "run_control",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where two outputs of one request differ.

    Attributes:
        index: of the first differing output token.
        plain_token, speculative_token: the two ids; ``None`` where that output had ended.
        gap: how far the worse of the two lies below the best score, in logits; ``None`` if an output had ended.
        top2_gap: the gap between the two best scores there.
        cut_margin: distance of the nearer token to a top_k, top_p or min_p cut, in logits; ``None`` without a cut.
        tolerance: what ``gap`` (or ``cut_margin``) is held against.
        verdict: ``tie`` or ``bug``.
    """

    prompt: str
    arm: str
    sampling: str
    index: int
    plain_token: int | None
    speculative_token: int | None
    gap: float | None
    top2_gap: float | None
    cut_margin: float | None
    tolerance: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReport:
    """One drafter at one number of draft tokens, over all prompts of one kind of sampling.

    ``verdict`` is ``identical``, ``tie`` or ``bug``; ``void`` if nothing was ever drafted, so that nothing was proved.
    """

    drafter: str
    num_draft_tokens: int
    sampling: str
    num_outputs: int
    num_identical: int
    num_tokens: int
    drafted: int
    accepted: int
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityReport:
    """The whole audit."""

    target: str
    fingerprint: str
    precision: str
    device: str
    control: Control
    arms: tuple[ArmReport, ...]
    differences: tuple[Difference, ...]

    @property
    def is_lossless(self) -> bool:
        """True if no difference is a bug."""
        return all(difference.verdict != "bug" for difference in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with ``is_lossless`` first."""
        return {"is_lossless": self.is_lossless, **asdict(self)}


def audit_identity(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    *,
    drafters: Mapping[str, Callable[[], Drafter | None]],
    num_draft_tokens: Sequence[int],
    sampling: Mapping[str, SamplingParams],
    config: EngineConfig | None = None,
    on_arm: Callable[[str], None] | None = None,
) -> IdentityReport:
    """Decode every prompt plainly and with every drafter, and compare.

    Args:
        target: the model.
        prompts: token ids by name.
        drafters: a maker of a fresh drafter, by name; one is made for each arm, so that no arm learns from another.
        num_draft_tokens: each k to try.
        sampling: fields by name; greedy, or with a seed.
        config: engine settings of all arms; k and the schedule (always ``fixed``) are set here.
        on_arm: told the name of each arm before it runs.

    Raises:
        ConfigError: nothing to compare, or sampling whose output is not a fixed function of the request.
    """
    _check_request(prompts, drafters, num_draft_tokens, sampling)
    config = replace(config or EngineConfig(max_batch_size=8), schedule="fixed")
    say = on_arm or (lambda name: None)
    say("plain")
    plain = {name: _decode(target, prompts, params, config, None) for name, params in sampling.items()}
    say("control")
    control = run_control(target, prompts, next(iter(plain.values())), prefill_chunk=config.prefill_chunk)
    arms: list[ArmReport] = []
    differences: list[Difference] = []
    for drafter, make in drafters.items():
        for k in num_draft_tokens:
            say(f"{drafter}, k={k}")
            arm_config = replace(config, num_draft_tokens=k)
            for kind, params in sampling.items():
                results = _decode(target, prompts, params, arm_config, make())
                pairs = _Pairs(target, prompts, params, kind, f"{drafter}, k={k}", control, config.prefill_chunk)
                found = pairs.differences(plain[kind], results)
                differences += found
                arms.append(_arm_report(drafter, k, kind, results, found))
    spec = target.spec
    return IdentityReport(
        target=spec.name,
        fingerprint=spec.fingerprint,
        precision=spec.precision,
        device=str(spec.device),
        control=control,
        arms=tuple(arms),
        differences=tuple(differences),
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first place where two token lists differ (one may just end there); ``None`` if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


@torch.inference_mode()
def explain(
    target: Target,
    prompt: Sequence[int],
    plain: GenerationResult,
    speculative: GenerationResult,
    *,
    params: SamplingParams,
    tolerance: float,
    prefill_chunk: int = 512,
) -> Difference | None:
    """Compare two outputs of one request; explain their first difference, or return ``None``.

    Args:
        target: the model.
        prompt: token ids.
        plain, speculative: the two results.
        params: of the request: greedy, or with a seed.
        tolerance: largest gap that counts as a tie, in logits.
        prefill_chunk: as in the engine.
    """
    index = first_difference(plain.token_ids, speculative.token_ids)
    if index is None:
        return None
    shared = plain.token_ids[:index]
    tokens = [ids[index] if index < len(ids) else None for ids in (plain.token_ids, speculative.token_ids)]
    present = [token for token in tokens if token is not None]
    scores_V, margin = _scores(target, prompt, shared, params, present, prefill_chunk)
    top2 = scores_V.topk(2).values
    gap = float(top2[0]) - min(float(scores_V[token]) for token in present) if len(present) == 2 else None
    # Logits move by rounding; a penalty that multiplies them multiplies that too.
    scale = max(params.repetition_penalty, 1 / params.repetition_penalty)
    excuses = [value for value in (gap, margin) if value is not None] if gap is not None else []
    return Difference(
        prompt=plain.id,
        arm="",
        sampling="",
        index=index,
        plain_token=tokens[0],
        speculative_token=tokens[1],
        gap=gap,
        top2_gap=float(top2[0] - top2[1]),
        cut_margin=margin,
        tolerance=tolerance * scale,
        verdict="tie" if any(value <= tolerance * scale for value in excuses) else "bug",
    )


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Compares the outputs of one arm with the plain ones."""

    target: Target
    prompts: Mapping[str, Sequence[int]]
    params: SamplingParams
    kind: str
    arm: str
    control: Control
    prefill_chunk: int

    def differences(
        self, plain: Sequence[GenerationResult], speculative: Sequence[GenerationResult]
    ) -> list[Difference]:
        found = []
        for prompt, left, right in zip(self.prompts.values(), plain, speculative, strict=True):
            difference = explain(
                self.target,
                prompt,
                left,
                right,
                params=self.params,
                tolerance=self.control.tolerance,
                prefill_chunk=self.prefill_chunk,
            )
            if difference is not None:
                found.append(replace(difference, arm=self.arm, sampling=self.kind))
        return found


def _check_request(
    prompts: Mapping[str, Sequence[int]],
    drafters: Mapping[str, Callable[[], Drafter | None]],
    num_draft_tokens: Sequence[int],
    sampling: Mapping[str, SamplingParams],
) -> None:
    for name, given in (
        ("prompt", prompts),
        ("drafter", drafters),
        ("number of draft tokens", num_draft_tokens),
        ("sampling", sampling),
    ):
        if not given:
            raise ConfigError(f"an audit of identity needs at least one {name}")
    for kind, params in sampling.items():
        if not params.is_greedy and params.seed is None:
            raise ConfigError(f"sampling {kind!r} draws fresh noise; identity needs temperature 0 or a seed")
        if params.n != 1:
            raise ConfigError(
                f"sampling {kind!r} has n = {params.n}; the audit compares one choice a prompt, give n = 1"
            )


def _decode(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    params: SamplingParams,
    config: EngineConfig,
    drafter: Drafter | None,
) -> list[GenerationResult]:
    engine = Engine(target, drafter=drafter, config=config)
    return engine.generate([list(prompt) for prompt in prompts.values()], params, ids=list(prompts))


def _arm_report(
    drafter: str, k: int, kind: str, results: Sequence[GenerationResult], found: Sequence[Difference]
) -> ArmReport:
    stats = SpeculationStats.pooled(result.stats for result in results)
    verdicts = {difference.verdict for difference in found}
    verdict = "bug" if "bug" in verdicts else "tie" if verdicts else "identical"
    return ArmReport(
        drafter=drafter,
        num_draft_tokens=k,
        sampling=kind,
        num_outputs=len(results),
        num_identical=len(results) - len(found),
        num_tokens=sum(len(result.token_ids) for result in results),
        drafted=stats.drafted,
        accepted=stats.accepted,
        verdict="void" if verdict == "identical" and stats.drafted == 0 and k > 0 else verdict,
    )


def _scores(
    target: Target,
    prompt: Sequence[int],
    shared: Sequence[int],
    params: SamplingParams,
    tokens: Sequence[int],
    prefill_chunk: int,
) -> tuple[Tensor, float | None]:
    """What plain decoding takes the argmax of behind the shared text, in logits, and the tokens' distance to a cut."""
    spec = target.spec
    seed = params.seed if params.seed is not None else 0
    tokenizer = getattr(target, "tokenizer", None)
    request = build_request(list(prompt), params, id="audit", seed=seed, spec=spec, tokenizer=tokenizer)
    state = SamplingState(
        request.params,
        prompt_tokens=prompt,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        seed=seed,
        choice=0,
    )
    state.commit(shared)
    [logits_BV] = forced_logits(target, [prompt], [shared], prefill_chunk=prefill_chunk, is_last_only=True)
    logits_BV = process_logits(logits_BV.clone(), [state], [()])
    if params.is_greedy:
        return logits_BV[0].double(), None
    key = noise_key(seed, 0, len(prompt) + len(shared), Purpose.TARGET)
    noise_BV = gumbel_BV([key], spec.vocab_size, spec.device)
    scores_BV = (warp_logits(logits_BV, [request.params]).double() + noise_BV) * params.temperature
    return scores_BV[0], _cut_margin(logits_BV[0].double() / params.temperature, params, tokens)


def _cut_margin(logits_V: Tensor, params: SamplingParams, tokens: Sequence[int]) -> float | None:
    """How little the law must move, in logits, for one of the tokens to cross a cut; ``None`` if nothing is cut.

    The mass that ``top_p`` sums moves by at most a quarter of what logits move by, so its margin in mass is counted
    fourfold; margins are of logits after temperature, hence the factor at the end.
    """
    margins: list[float] = []
    if params.min_p > 0:
        floor = float(logits_V.max()) + math.log(params.min_p)
        margins += [abs(float(logits_V[token]) - floor) for token in tokens]
    if 0 < params.top_k < logits_V.shape[0]:
        last_in, first_out = logits_V.topk(params.top_k + 1).values[-2:].tolist()
        margins += [max(last_in - float(logits_V[token]), float(logits_V[token]) - first_out) for token in tokens]
    if params.top_p < 1:
        probs_V, ids_V = logits_V.softmax(dim=-1).sort(descending=True, stable=True)
        before_V = probs_V.cumsum(dim=-1) - probs_V
        margins += [4 * abs(float(before_V[ids_V == token]) - params.top_p) for token in tokens]
    return min(margins) * params.temperature if margins else None
