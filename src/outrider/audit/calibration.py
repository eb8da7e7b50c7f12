"""Is unseeded sampled output a draw from the target's own processed law? (``outrider audit calibration``)

Answers are decoded by the engine in question (ours with any drafter, or a server), read again by the target, and every token
is held against the law it should have been drawn from (:mod:`outrider.audit.scoring`). What speaks against the claim is
weighed in :mod:`outrider.audit.statistics`, with a family-wise false alarm of 1 in 1000.

Which null? A control decodes plainly at two batch shapes and shows how far rounding alone moves the target's logits. Where
it moves them by no more than 1e-4, on our own engine, the recomputed law *is* the law (*one sample*). Elsewhere (other
precisions on the PyTorch path, other engines) the plain arm of the same engine is decoded as well, and what is tested is
that speculation changes nothing (*two samples*).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.audit.calibration_report import CalibrationReport, Repeat, Speculation
from outrider.audit.channels import channels_of, new_evidence, output_sums
from outrider.audit.control import FLOAT32_CAP, Control, run_control
from outrider.audit.guesses import Output
from outrider.audit.orders import order_of
from outrider.audit.scoring import Outside, Scorer, Scores
from outrider.audit.sources import OutputSource
from outrider.audit.statistics import ALPHA, POWER_Z, Evidence, Exchange, Floats, Summary, exchange_test
from outrider.drafters.base import Drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.metrics import SpeculationStats
from outrider.models.base import Target
from outrider.sampling.params import SamplingParams

__all__ = ["Calibration", "CalibrationSettings", "audit_calibration"]

FIRST_ROUND, ANSWERS_A_ROUND = 16, 64
"""Answers decoded together, then read again; the evidence of one sample is looked at after each round."""
FEWEST_PAIRS = 20
"""Fewer pairs of answers cannot be exchanged in enough ways to reach a false alarm of 1 in 1000."""
REPEAT_CHANCE = 1e-9
"""Chance below which an equal pair of answers is no coincidence but noise used twice."""
HISTOGRAM_BINS = 20
SAFETY = 2.0
"""Of two arms, the tolerance is this many times the largest gap of the plain one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """How to audit.

    Attributes:
        num_tokens: output tokens to look at (of each arm).
        null: ``auto`` (see above), ``one-sample`` or ``two-sample``.
        order: the engine's order of processing, see :func:`outrider.audit.orders.order_of`.
        seed: of everything that is drawn here.
        alpha: family-wise false alarm.
        is_foreign: the outputs come from another engine, whose arithmetic is not the target's.
    """

    num_tokens: int = 20_000
    null: str = "auto"
    order: str = "vllm"
    seed: int = 0
    alpha: float = ALPHA
    is_foreign: bool = False

    def __post_init__(self) -> None:
        if self.num_tokens < 100:
            raise ConfigError(f"{self.num_tokens} tokens are too few to see anything; give 100 or more")
        if self.null not in ("auto", "one-sample", "two-sample"):
            raise ConfigError(f"null {self.null!r} is unknown; allowed: auto, one-sample, two-sample")
        if not 0 < self.alpha < 0.5:
            raise ConfigError(f"a false alarm of {self.alpha} is not possible; allowed: above 0, below 0.5")


def audit_calibration(
    target: Target,
    prompts: Mapping[str, Sequence[int]],
    *,
    source: OutputSource,
    params: SamplingParams,
    plain: OutputSource | None = None,
    make_drafter: Callable[[], Drafter] | None = None,
    settings: CalibrationSettings | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrationReport:
    """Decode, read again, and weigh.

    Args:
        target: the weights at hand.
        prompts: token ids by name; each is answered again and again, with fresh noise, until there are enough tokens.
        source: who answers.
        params: sampling fields that the source was told; a temperature above 0, no seed.
        plain: the same engine without speculation: the null of two samples, and the tolerance of foreign arithmetic.
        make_drafter: a maker of the drafter whose guesses to follow.
        settings: how much, which null, whose order.
        on_progress: told what is going on.

    Raises:
        ConfigError: settings that cannot be audited.
    """
    settings = settings or CalibrationSettings()
    _check(prompts, params, settings)
    control = _control(target, prompts, params)
    audit = Calibration(
        target,
        prompts,
        params=params,
        settings=settings,
        control=control,
        make_drafter=make_drafter,
        say=on_progress or (lambda line: None),
    )
    is_exact = not settings.is_foreign and control.deviation <= FLOAT32_CAP
    wants_two = settings.null == "two-sample" or (settings.null == "auto" and not is_exact)
    if wants_two and plain is None and settings.null == "two-sample":
        raise ConfigError("two samples need a plain arm; give the same engine without speculation")
    if wants_two and plain is not None:
        return audit.two_samples(source, plain)
    return audit.one_sample(source, is_exact=is_exact)


def _check(prompts: Mapping[str, Sequence[int]], params: SamplingParams, settings: CalibrationSettings) -> None:
    if not prompts:
        raise ConfigError("an audit of calibration needs at least one prompt")
    if params.is_greedy:
        raise ConfigError("temperature 0 draws nothing; outrider audit identity checks greedy output")
    if params.seed is not None:
        raise ConfigError("a seed makes every answer the same; outrider audit identity checks seeded output")
    if params.n != 1:
        raise ConfigError(f"n = {params.n} is not possible here; give n = 1 and more tokens")
    order = order_of(settings.order)
    neutral = SamplingParams()
    for name in order.refused:
        if getattr(params, name) != getattr(neutral, name):
            raise ConfigError(f"{name} is not applied as ours by {order.name}; leave it out")


def _control(target: Target, prompts: Mapping[str, Sequence[int]], params: SamplingParams) -> Control:
    """How far rounding moves this target's logits, on a few short plain answers."""
    few = dict(list(prompts.items())[:4])
    greedy = SamplingParams(max_tokens=min(16, params.max_tokens))
    engine = Engine(target, config=EngineConfig(max_batch_size=1))
    results = engine.generate([list(prompt) for prompt in few.values()], greedy)
    return run_control(target, few, results)


class Calibration:
    """One audit in progress."""

    def __init__(
        self,
        target: Target,
        prompts: Mapping[str, Sequence[int]],
        *,
        params: SamplingParams,
        settings: CalibrationSettings,
        control: Control,
        make_drafter: Callable[[], Drafter] | None,
        say: Callable[[str], None],
    ) -> None:
        self._target, self._prompts, self._params = target, prompts, params
        self._settings, self._control, self._say = settings, control, say
        self._scorer = Scorer(
            target,
            params=params,
            order=order_of(settings.order),
            noise=np.random.default_rng([settings.seed, 1]),
            make_drafter=make_drafter,
        )
        self._histogram = np.zeros(HISTOGRAM_BINS)
        self._num_outputs = 0
        self._seen: dict[tuple[str, tuple[int, ...]], float] = {}
        self._seeds: Counter[int] = Counter()
        self._repeats: list[Repeat] = []

    def one_sample(self, source: OutputSource, *, is_exact: bool) -> CalibrationReport:
        """Tokens against the recomputed law, until there are enough or the alarm is raised."""
        evidence = new_evidence(len(self._scorer.guess_names), self._settings.alpha)
        outside: list[Outside] = []
        rounds = self._rounds(FIRST_ROUND)
        while evidence.num_tokens < self._settings.num_tokens and evidence.alarm_at is None:
            scores = self._score(source.answer(next(rounds)))
            evidence.add(channels_of(scores), len(scores))
            outside += scores.outside
            self._say(f"{evidence.num_tokens} tokens, evidence {evidence.log_capital / math.log(10):+.1f}")
            if is_exact and self._violations(outside, self._tolerance):
                break
        return self._one_sample_report(source, evidence, outside, is_exact)

    def two_samples(self, source: OutputSource, plain: OutputSource) -> CalibrationReport:
        """The speculative arm against the plain one, in pairs of answers to one prompt, which may be exchanged."""
        sums: list[Floats] = []
        counts: Floats | None = None
        names: list[str] = []
        outside: list[list[Outside]] = [[], []]
        num_tokens = num_pairs = 0
        rounds = self._rounds(ANSWERS_A_ROUND)
        while num_tokens < self._settings.num_tokens or num_pairs < FEWEST_PAIRS:
            asked = next(rounds)
            arms = []
            for arm, each in enumerate((source, plain)):
                scores = self._score(each.answer(asked), is_counted=arm == 0)
                outside[arm] += scores.outside
                names, tokens, columns = output_sums(scores, len(asked))
                arms.append(columns)
                if arm == 0:
                    num_tokens += len(scores)
                    counts = np.asarray(tokens, dtype=np.float64) + (0 if counts is None else counts)
            num_pairs += len(asked)
            sums.append(arms[0] - arms[1])
            self._say(f"{num_tokens} tokens of each arm")
        assert counts is not None
        result = exchange_test(np.concatenate(sums), self._settings.seed, alpha=self._settings.alpha)
        return self._two_sample_report(
            source, plain, result, list(zip(names, counts, strict=True)), outside, num_tokens
        )

    def _rounds(self, first: int) -> Iterator[list[tuple[str, Sequence[int]]]]:
        """Prompts to answer together, for ever; answers to one prompt stand together, so that it is read once.

        Rounds grow from ``first`` answers to ``ANSWERS_A_ROUND``: a gross fault is found early, a sound engine decodes in
        large batches.
        """
        prompts = list(self._prompts.items())
        size, start = first, 0
        while True:
            copies = max(1, size // len(prompts))
            part = [prompts[(start + index) % len(prompts)] for index in range(min(size, len(prompts)))]
            yield [prompt for prompt in part for _ in range(copies)]
            start = (start + len(part)) % len(prompts)
            size = min(2 * size, ANSWERS_A_ROUND)

    def _score(self, outputs: Sequence[Output], *, is_counted: bool = True) -> Scores:
        scores = self._scorer.score(outputs)
        self._find_repeats(outputs, scores)
        if is_counted:
            self._num_outputs += len(outputs)
            self._histogram += np.histogram(scores.u[scores.inside], bins=HISTOGRAM_BINS, range=(0, 1))[0]
        return scores

    def _find_repeats(self, outputs: Sequence[Output], scores: Scores) -> None:
        """Equal answers to one prompt are fine if they are likely; else the same noise was used twice."""
        for output, logprob in zip(outputs, scores.output_logprobs(len(outputs)), strict=True):
            key = (output.prompt_id, output.tokens)
            before = self._seen.get(key)
            self._seen[key] = float(logprob)
            chance = math.exp(min(0.0, float(logprob))) * (1 + self._num_outputs)
            if before is not None and chance < REPEAT_CHANCE:
                self._repeats.append(Repeat(prompt_id=output.prompt_id, tokens=len(output.tokens), chance=chance))
            if output.seed is not None:
                self._seeds[output.seed] += 1
                if self._seeds[output.seed] == 2:
                    self._repeats.append(Repeat(prompt_id=output.prompt_id, tokens=len(output.tokens), chance=0.0))

    @property
    def _tolerance(self) -> float:
        """Of one sample. Where rounding moves nothing, nothing is excused; where it does, the control saw only a part."""
        return 0.0 if self._control.deviation == 0 else max(FLOAT32_CAP, self._control.tolerance)

    def _violations(self, outside: Sequence[Outside], tolerance: float) -> tuple[Outside, ...]:
        return tuple(each for each in outside if each.gap > tolerance)

    def _one_sample_report(
        self, source: OutputSource, evidence: Evidence, outside: Sequence[Outside], is_exact: bool
    ) -> CalibrationReport:
        violations = self._violations(outside, self._tolerance)
        unchecked = _unchecked(self._params, source.speculation)
        if not is_exact:
            unchecked.insert(
                0,
                "the null: the recomputed law differs from the engine's own by its arithmetic, and no plain arm tells by how "
                "much; evidence against it may be a fault or only another rounding",
            )
        failed = evidence.alarm_at is not None or (is_exact and bool(violations))
        report = self._report(source, unchecked, null="one-sample", num_tokens=evidence.num_tokens)
        return replace(
            report,
            verdict=self._verdict(failed, is_exact, source.speculation),
            evidence=evidence.log_capital / math.log(10),
            alarm_at=evidence.alarm_at,
            channels=tuple(evidence.summaries()),
            violations=violations,
            num_outside=len(outside),
        )

    def _two_sample_report(
        self,
        source: OutputSource,
        plain: OutputSource,
        result: Exchange,
        counted: Sequence[tuple[str, float]],
        outside: Sequence[Sequence[Outside]],
        num_tokens: int,
    ) -> CalibrationReport:
        # The plain arm may leave the recomputed support, too. Whether the other does so more often is among the numbers
        # that are exchanged; what lies further outside than anything plain is listed, as a hint.
        tolerance = max(self._control.tolerance, SAFETY * max((each.gap for each in outside[1]), default=0.0))
        summaries = []
        for (name, count), z, scale in zip(counted, result.z, result.scale, strict=True):
            kind, _, stratum = name.partition(" | ")
            is_seen = count > 0 and scale > 0
            summaries.append(
                Summary(
                    kind=kind,
                    stratum=stratum,
                    tokens=int(count),
                    mean=float(z * scale / count) if is_seen else None,
                    z=float(z) if is_seen else None,
                    evidence=None,
                    detectable=float((result.critical + POWER_Z) * scale / count) if is_seen else None,
                )
            )
        failed = result.p_value <= self._settings.alpha
        report = self._report(source, _unchecked(self._params, source.speculation), "two-sample", num_tokens)
        return replace(
            report,
            verdict=self._verdict(failed, True, source.speculation),
            plain=plain.origin,
            p_value=result.p_value,
            critical=result.critical,
            channels=tuple(summaries),
            violations=self._violations(outside[0], tolerance),
            num_outside=len(outside[0]),
            tolerance=tolerance,
        )

    def _verdict(self, failed: bool, is_exact: bool, stats: SpeculationStats | None) -> str:
        if self._repeats:
            return "void"
        if failed:
            return "biased" if is_exact else "deviates"
        if not is_exact:
            return "no sign"
        return "void" if stats is not None and stats.passes > 0 and self._is_idle(stats) else "calibrated"

    def _is_idle(self, stats: SpeculationStats) -> bool:
        return stats.drafted == 0 and self._scorer.guess_names != ("n-gram",)

    def _report(self, source: OutputSource, unchecked: list[str], null: str, num_tokens: int) -> CalibrationReport:
        spec = self._target.spec
        return CalibrationReport(
            target=spec.name,
            fingerprint=spec.fingerprint,
            precision=spec.precision,
            path=spec.path,
            device=str(spec.device),
            source=source.origin,
            sampling=self._params,
            order=self._settings.order,
            null=null,
            alpha=self._settings.alpha,
            seed=self._settings.seed,
            prompts=len(self._prompts),
            outputs=self._num_outputs,
            tokens=num_tokens,
            guesses=self._scorer.guess_names,
            control=self._control,
            tolerance=self._tolerance,
            histogram=tuple(int(count) for count in self._histogram),
            repeats=tuple(self._repeats),
            unchecked=tuple(unchecked),
            speculation=_speculation(source.speculation),
        )


def _speculation(stats: SpeculationStats | None) -> Speculation | None:
    if stats is None:
        return None
    return Speculation(
        passes=stats.passes, drafted=stats.drafted, accepted=stats.accepted, tokens_per_pass=stats.tokens_per_pass
    )


def _unchecked(params: SamplingParams, stats: SpeculationStats | None) -> list[str]:
    notes = [
        "deviations smaller than those of the column 'detectable', and any that cancel in every stratum",
        "dependence between answers beyond repeated ones",
        f"answers longer than {params.max_tokens} tokens",
    ]
    if stats is None:
        notes.append("whether anything was drafted: the server does not tell; look at its metrics")
    if params.stop:
        notes.append("the text of stop strings: token ids are checked up to the token that completed one")
    return notes
