"""What the doctor is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.audit.doctor.live import LiveRun, Speed, measure_speed, run_live
from outrider.audit.doctor.report import Finding, Status, compare
from outrider.drafters.base import Drafter
from outrider.drafters.build import make_drafter
from outrider.models.base import LoadedTarget
from outrider.sampling.params import SamplingParams

__all__ = ["Case", "cost", "renderings", "temperature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A drafter, its target and some requests.

    Attributes:
        target: as it is served. draft: the drafter's name with its options.
        prompts: token ids. params: temperature and length of the answers.
        num_draft_tokens: draft tokens a step.
        renderings: the same requests rendered in other ways, by name.
        is_timed: measure passes and drafting, too. offline: look for draft models on this machine only.
        say: told what is being done.
    """

    target: LoadedTarget
    draft: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    num_draft_tokens: int = 4
    renderings: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    is_timed: bool = True
    offline: bool = False
    say: Callable[[str], None] = lambda line: None

    @property
    def greedy(self) -> SamplingParams:
        """The same at temperature 0."""
        return replace(self.params, temperature=0.0)

    def drafter(self) -> Drafter | None:
        """A fresh drafter, which has learnt nothing yet."""
        return make_drafter(self.draft, self.target, offline=self.offline)

    def run(
        self,
        drafter: Drafter | None,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]] | None = None,
        *,
        target: LoadedTarget | None = None,
    ) -> LiveRun:
        """Decode the prompts (or others) with the engine."""
        k = self.num_draft_tokens
        return run_live(target or self.target, drafter, prompts or self.prompts, params, num_draft_tokens=k)

    def speed(self, run: LiveRun) -> Speed | None:
        """Times of passes; ``None`` if they were left out, or nothing was drafted."""
        if not self.is_timed:
            return None
        self.say("timing passes")
        return measure_speed(self.target, run, num_draft_tokens=self.num_draft_tokens)


_LEAST_LOSS = 0.05
"""Tokens a pass that a temperature must take to be named without proof."""


def temperature(case: Case, served: LiveRun, greedy: LiveRun, *, explains: bool = False) -> Finding:
    """Does the requests' temperature cost acceptance?

    Args:
        case: what is examined. served, greedy: at the requests' temperature and at 0.
        explains: the card is missed at this temperature, and is not at 0.
    """
    given = case.params.temperature
    if not given:
        return Finding(
            cause="temperature",
            place="traffic",
            status="clear",
            title="Temperature",
            evidence="the requests are greedy",
        )
    gain = compare(served.stats, greedy.stats)
    unproved: Status = "seen" if explains and gain.after - gain.before >= _LEAST_LOSS else "clear"
    return Finding(
        cause="temperature",
        place="traffic",
        status="proved" if gain.is_proved else unproved,
        title=f"Temperature {given:g} costs acceptance",
        evidence=f"at temperature 0: {gain.to_text()}",
        remedy="lower the temperature where the task allows it, draft fewer tokens (-k), or train on answers sampled at "
        "this temperature; judge a drafter at the temperature that is served",
        gain=gain,
        weight=60,
    )


def renderings(case: Case, greedy: LiveRun) -> list[Finding]:
    """Does another rendering of the same requests suit the drafter better?"""
    findings = []
    for name, prompts in case.renderings.items():
        case.say(f"decoding the requests {name}")
        gain = compare(greedy.stats, case.run(case.drafter(), case.greedy, prompts).stats)
        findings.append(
            Finding(
                cause="template",
                place="wiring",
                status="proved" if gain.is_proved else "clear",
                title=f"The requests are not rendered as the drafter knows them; {name} they are",
                evidence=f"{name}: {gain.to_text()}",
                remedy="send chats as messages, so that the target's chat template renders them as it did for training",
                gain=gain,
            )
        )
    return findings


def cost(case: Case, speed: Speed | None, run: LiveRun) -> Finding:
    """Does drafting cost more than it saves?"""
    if speed is None:
        why = "nothing was drafted" if case.is_timed else "speed was left out"
        return Finding(cause="cost", place="cost", status="not checked", title="Cost of drafting", evidence=why)
    tokens = run.pooled.tokens_per_pass
    return Finding(
        cause="cost",
        place="cost",
        status="seen" if speed.speed_up < 0.97 else "clear",
        title="The drafter is too slow for its acceptance",
        evidence=f"a plain pass takes {speed.plain_ms:.2f} ms, one that checks the draft {speed.verify_ms:.2f} ms, drafting "
        f"{speed.draft_ms:.2f} ms: it breaks even at {speed.break_even:.2f} tokens a pass and makes {tokens:.2f} "
        f"({speed.speed_up:.2f} times plain decoding)",
        remedy="draft fewer tokens (-k), take a smaller draft model, fewer layers, a smaller draft vocabulary or a lower "
        "precision of the drafter; the adaptive schedule turns drafting off where it does not pay",
        weight=30,
    )
