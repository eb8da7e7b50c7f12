"""A whole measurement: from a file of traffic to a :class:`outrider.measure.record.MeasureResult`.

Requests are taken some at a time (``batch_size``), answered if they have no answer, read once by the target, and scored
under every arm; then they are forgotten. So memory holds one such group and a few numbers for each request and arm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from outrider.device import one_torch_thread
from outrider.drafters.base import Drafter
from outrider.drafters.build import make_drafter
from outrider.engine.taps import wanted_taps
from outrider.errors import ConfigError, DataError
from outrider.measure.answers import (
    AnsweredText,
    AnswerStore,
    Question,
    answer_all,
    generated_text,
    limit_of,
    question_of,
    recorded_text,
)
from outrider.measure.contenders import Contender, arms_of, remembers_answers
from outrider.measure.live import LiveRun, decode_live
from outrider.measure.reading import TrafficReader
from outrider.measure.record import (
    Arm,
    Counts,
    MeasureResult,
    PassCosts,
    RequestRecord,
    Sample,
    SkippedRow,
    Source,
    short_names,
)
from outrider.measure.replay import refusal, replay_group
from outrider.measure.samples import pieces_of
from outrider.measure.settings import MeasureSettings, answers_made_from, provenance
from outrider.measure.tally import Mark
from outrider.measure.target_pass import ReadText, read_text
from outrider.measure.timing import draft_ms, pass_costs
from outrider.models.base import LoadedTarget

__all__ = ["MeasureSettings", "Progress", "measure"]

_TIMED_OUTPUT = 64
_FIRST_KEY = 1 << 32
"""Of sequences that are replayed: far from those of an engine that a drafter may have served."""
_SAMPLES_A_DRAFTER = 6
_MOST_SKIPPED = 100_000
"""Past this a file is something else, and its reasons would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a measurement is: what it does, requests done, answer tokens so far."""

    stage: str
    num_done: int
    num_tokens: int


@dataclass(slots=True)
class _Ledger:
    """What has been found so far."""

    records: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    skipped: list[SkippedRow] = field(default_factory=list)
    num_measured: int = 0
    num_tokens: int = 0
    num_off_policy: int = 0
    agreement: list[float] = field(default_factory=list)


def measure(
    target: LoadedTarget,
    traffic: BinaryIO,
    settings: MeasureSettings,
    *,
    traffic_name: str = "",
    answers_path: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> MeasureResult:
    """Measure drafters on traffic.

    Args:
        target: the model that is to be made faster.
        traffic: JSON Lines, opened for reading bytes.
        settings: what to measure.
        traffic_name: what results call the file.
        answers_path: file of the target's own answers, made or continued.
        on_progress: told after every group.

    Raises:
        ConfigError: something that cannot be measured, named before anything is read.
        DataError: no line can be measured, or ``answers_path`` holds answers of another origin.
    """
    run = _Run(target, traffic, settings, traffic_name=traffic_name, answers_path=answers_path, on_progress=on_progress)
    with one_torch_thread(target.spec.path.startswith("native")), torch.inference_mode():
        return run.live() if settings.source == "live" else run.replay()


class _Run:
    """One measurement on its way."""

    def __init__(
        self,
        target: LoadedTarget,
        traffic: BinaryIO,
        settings: MeasureSettings,
        *,
        traffic_name: str,
        answers_path: Path | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._target, self._settings = target, settings
        self._tokenizer, self._traffic_name = target.tokenizer, traffic_name
        self._reader = TrafficReader(traffic, answers=settings.answers, chat=settings.chat)
        self._store: AnswerStore | None = None
        if settings.source == "replay":
            self._store = AnswerStore(answers_path, answers_made_from(target, settings.sampling))
        self._on_progress = on_progress
        self._ledger = _Ledger()
        self._prompts: set[int] = set()
        self._longest: AnsweredText | None = None  # drafting is timed on it
        self._keys = itertools.count(_FIRST_KEY)
        self._is_cut = False

    def replay(self) -> MeasureResult:
        """Score every group under all arms."""
        contenders = [self._contender(spec) for spec in self._settings.drafters]
        layers = tuple(sorted({layer for each in contenders for layer in wanted_taps(each.drafter)}))
        for group in self._groups():
            reads = [read_text(self._target, text, layers) for text in self._answered(group)]
            for contender in contenders:
                self._score(contender, reads)
            self._note(reads)
            self._tell("scoring")
        timed = {arm: self._draft_ms(each.drafter, k) for each in contenders for k, arm in each.arms.items()}
        return self._result(contenders, timed)

    def live(self) -> MeasureResult:
        """Decode everything with every arm, one arm after the other, each with a drafter of its own."""
        questions = [question for group in self._groups() for question in group]
        contenders = []
        timed: dict[Arm, float | None] = {}
        for spec in self._settings.drafters:
            contender = self._contender(spec)
            for index, (k, arm) in enumerate(contender.arms.items()):
                drafter = contender.drafter if index == 0 else self._make(spec)
                for run in self._decode(drafter, questions, k):
                    self._record_live(run, arm, is_watched=k == contender.watched)
                timed[arm] = self._draft_ms(drafter, k)
            contenders.append(contender)
        self._ledger.num_measured = len(questions)
        return self._result(contenders, timed)

    def _contender(self, spec: str) -> Contender:
        drafter = self._make(spec)
        sampling, verification = self._settings.sampling, self._settings.verification
        reason = refusal(
            drafter, is_greedy=sampling.is_greedy, has_seed=sampling.seed is not None, verification=verification
        )
        if reason is not None and self._settings.source == "replay":
            raise ConfigError(f"drafter {spec!r} cannot be replayed: {reason}; give --live, or --seed")
        label = short_names(self._settings.drafters)[spec]
        arms = arms_of(spec, drafter, self._settings.num_draft_tokens, sampling, verification, label=label)
        return Contender(spec, drafter, arms)

    def _make(self, spec: str) -> Drafter:
        drafter = make_drafter(spec, self._target, offline=self._settings.offline)
        if drafter is None:
            raise ConfigError("--draft none is the baseline that everything is compared with; leave it out")
        return drafter

    def _groups(self) -> Iterator[list[Question]]:
        """Requests that can be measured, ``batch_size`` at a time; the others are noted."""
        group: list[Question] = []
        taken = 0
        for found in self._reader:
            if isinstance(found, SkippedRow):
                self._skip(found)
                continue
            if self._settings.limit and taken >= self._settings.limit:
                self._is_cut = True
                break
            question = question_of(found, self._settings.sampling, self._target, self._tokenizer)
            if isinstance(question, SkippedRow):
                self._skip(question)
                continue
            taken += 1
            group.append(self._marked(question))
            if len(group) == self._settings.batch_size:
                yield group
                group = []
        if group:
            yield group

    def _skip(self, row: SkippedRow) -> None:
        self._ledger.skipped.append(row)
        if len(self._ledger.skipped) > _MOST_SKIPPED:
            raise DataError(
                f"more than {_MOST_SKIPPED} lines of the traffic cannot be measured, the last because: {row.reason}; "
                "is it JSON Lines?"
            )

    def _marked(self, question: Question) -> Question:
        """With a label if an earlier request had the very same prompt: such traffic flatters drafters that remember."""
        key = hash(question.request.prompt)
        if key in self._prompts:
            return replace(question, labels={**question.labels, "traffic": "repeated"})
        self._prompts.add(key)
        return question

    def _answered(self, group: Sequence[Question]) -> list[AnsweredText]:
        """The group's texts, recorded or written now, in its order."""
        assert self._store is not None
        texts: dict[str, AnsweredText] = {}
        missing: list[Question] = []
        for question in group:
            if question.ask.answer is None:
                missing.append(question)
                continue
            found = recorded_text(question, self._tokenizer)
            if isinstance(found, SkippedRow):
                self._skip(found)
            elif len(found.tokens) > self._target.spec.max_positions:
                reason = f"prompt and answer longer than the window of {self._target.spec.max_positions} tokens"
                self._skip(SkippedRow(line=found.line, reason=reason))
            else:
                texts[question.request.id] = found
        for text in answer_all(
            self._target,
            missing,
            self._store,
            batch_size=self._settings.batch_size,
            tokenizer=self._tokenizer,
            on_answer=lambda num_tokens: self._tell("answering"),
        ):
            texts[text.id] = text
        return [texts[question.request.id] for question in group if question.request.id in texts]

    def _score(self, contender: Contender, reads: Sequence[ReadText]) -> None:
        wanted = [read for read in reads if self._can_replay(contender, read)]
        if not wanted:
            return
        scored = replay_group(
            contender.drafter,
            wanted,
            tuple(contender.arms),
            keys=self._keys,
            verification=self._settings.verification,
            watched=contender.watched,
        )
        for read, scores in zip(wanted, scored, strict=True):
            for k, arm in contender.arms.items():
                self._record(read.text, arm, scores.counts[k], source="replay", is_on_policy=read.is_on_policy)
            if scores.marks:
                self._sample(read.text, contender.arms[contender.watched], scores.marks)

    def _can_replay(self, contender: Contender, read: ReadText) -> bool:
        """A row's own sampling fields may ask for what cannot be replayed with this drafter."""
        params = read.text.params
        reason = refusal(
            contender.drafter,
            is_greedy=params.is_greedy,
            has_seed=params.seed is not None,
            verification=self._settings.verification,
        )
        if reason is not None:
            self._skip(SkippedRow(line=read.text.line, reason=f"not replayed with {contender.spec}: {reason}"))
        return reason is None

    def _note(self, reads: Sequence[ReadText]) -> None:
        ledger = self._ledger
        ledger.num_measured += len(reads)
        ledger.num_tokens += sum(len(read.text.output) for read in reads)
        ledger.num_off_policy += sum(not read.is_on_policy for read in reads)
        ledger.agreement += [read.agreement for read in reads if read.agreement is not None]
        if self._longest is None and reads:
            self._longest = max((read.text for read in reads), key=lambda text: len(text.output))

    def _decode(self, drafter: Drafter, questions: Sequence[Question], k: int) -> Iterator[LiveRun]:
        settings = self._settings
        for run in decode_live(
            self._target,
            drafter,
            questions,
            num_draft_tokens=k,
            batch_size=settings.batch_size,
            verification=settings.verification,
        ):
            self._ledger.num_measured += 1
            self._ledger.num_tokens += len(run.output)
            self._tell("decoding")
            yield run

    def _record_live(self, run: LiveRun, arm: Arm, *, is_watched: bool) -> None:
        limit = limit_of(run.question, self._target)
        text = generated_text(run.question, run.output, limit=limit, tokenizer=self._tokenizer)
        self._record(text, arm, run.counts, source="live", is_on_policy=True)
        if self._longest is None or len(text.output) > len(self._longest.output):
            self._longest = text
        if is_watched:
            self._sample(text, arm, run.marks)

    def _record(self, text: AnsweredText, arm: Arm, counts: Counts, *, source: Source, is_on_policy: bool) -> None:
        self._ledger.records.append(
            RequestRecord(
                id=text.id,
                line=text.line,
                labels=text.labels,
                arm=arm,
                counts=counts,
                source=source,
                is_on_policy=is_on_policy,
                num_prompt_tokens=len(text.prompt),
                num_output_tokens=len(text.output),
            )
        )

    def _sample(self, text: AnsweredText, arm: Arm, marks: Sequence[Mark]) -> None:
        taken = sum(sample.arm == arm for sample in self._ledger.samples)
        if self._tokenizer is not None and self._settings.keeps_text and taken < _SAMPLES_A_DRAFTER:
            pieces = pieces_of(text.output, marks, self._tokenizer)
            self._ledger.samples.append(Sample(id=text.id, arm=arm, pieces=pieces))

    def _tell(self, stage: str) -> None:
        ledger = self._ledger
        self._on_progress(Progress(stage=stage, num_done=ledger.num_measured, num_tokens=ledger.num_tokens))

    def _draft_ms(self, drafter: Drafter, k: int) -> float | None:
        """Milliseconds of drafting, on one text alone. Last of all, since a drafter may remember that text."""
        if self._longest is None:
            return None
        text = replace(self._longest, output=self._longest.output[:_TIMED_OUTPUT])
        read = read_text(self._target, text, wanted_taps(drafter))
        return draft_ms(drafter, read, k, key=next(self._keys), verification=self._settings.verification)

    def _costs(self, by_arm: Mapping[Arm, float | None]) -> PassCosts:
        found = {arm.name: ms for arm, ms in by_arm.items() if ms is not None}
        return pass_costs(self._target, self._settings.num_draft_tokens, found)

    def _result(self, contenders: Sequence[Contender], timed: Mapping[Arm, float | None]) -> MeasureResult:
        ledger = self._ledger
        if not ledger.records:
            reasons = ", ".join(sorted({row.reason for row in ledger.skipped})[:5]) or "it is empty"
            raise DataError(f"no line of the traffic can be measured: {reasons}")
        return MeasureResult(
            arms=tuple(arm for contender in contenders for arm in contender.arms.values()),
            records=tuple(ledger.records),
            samples=tuple(ledger.samples),
            skipped=tuple(ledger.skipped),
            num_rows=self._reader.num_lines - self._is_cut,
            settings=provenance(self._target, self._settings, contenders, self._found()),
            costs=self._costs(timed),
            warnings=tuple(self._warnings(contenders)),
        )

    def _found(self) -> dict[str, Any]:
        ledger = self._ledger
        agreement = sum(ledger.agreement) / len(ledger.agreement) if ledger.agreement else None
        return {
            "traffic": self._traffic_name,
            "traffic_digest": self._reader.digest,
            "num_requests": ledger.num_measured,
            "num_off_policy": ledger.num_off_policy,
            "mean_agreement": agreement,
        }

    def _warnings(self, contenders: Sequence[Contender]) -> Iterator[str]:
        ledger, settings = self._ledger, self._settings
        if ledger.num_off_policy:
            yield (
                f"{ledger.num_off_policy} of {ledger.num_measured} answers are off-policy: not what this target says under "
                "these settings; they are shown apart and count in no verdict (--answers generate lets the target answer)"
            )
        if self._is_cut:
            yield f"only the first {settings.limit} requests were measured (--limit 0 measures all)"
        if (
            settings.source == "replay"
            and settings.batch_size > 1
            and any(remembers_answers(c.drafter) for c in contenders)
        ):
            yield (
                f"suffix drafts from earlier answers: with {settings.batch_size} requests side by side it has seen fewer "
                "of them than one after the other (--batch-size 1)"
            )
