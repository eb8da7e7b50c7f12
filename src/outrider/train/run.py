"""A whole training run: from rows of traffic to a head that is served. Stages go on where an interrupted run stopped.

What lies in the folder of a run::

    config.json model.safetensors README.md   the best head so far, ready for --draft
    curves.html (curves.png)                  what was measured while it was trained
    training/log.jsonl                        one line for some updates and every evaluation
    training/answers.jsonl                    what the target answered
    training/taps/                            shards, if taps are stored
    training/state.pt                         where to go on
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.drafters.head_folder import HeadInfo, save_head
from outrider.drafters.head_record import answer_statistics, common_tokens, tap_statistics, tensor_statistics
from outrider.errors import ConfigError
from outrider.files import append_line, hold, read_lines, replace_file
from outrider.models.base import LoadedTarget
from outrider.train.answers import AnswerSettings, AnswerSource, answer_all
from outrider.train.capture import LiveStates, StateSource, capture_shards
from outrider.train.checkpoint import load_state, save_state
from outrider.train.config import TrainConfig
from outrider.train.corpus import Corpus, Text, check_any_trained
from outrider.train.curves import write_curves
from outrider.train.data import DraftVocabulary, Schedule, choose_vocabulary, split_held_out, vocabulary_of
from outrider.train.evaluate import Acceptance, decode_held_out, forced_agreement, head_drafter, prompt_tokens
from outrider.train.forecast import Plan, matrix_rate, run_trial
from outrider.train.loop import Trainer, UpdateReport, load_batch
from outrider.train.packing import rows_of
from outrider.train.start import Start, initialise

__all__ = ["Job", "Reporter", "train_eagle"]

_LOG_EVERY = 10


class Reporter(Protocol):
    """Who is told what happens."""

    def say(self, line: str) -> None:
        """Something worth a line."""
        ...

    def progress(self, stage: str, done: float, total: float, note: str = "") -> None:
        """How far a stage is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to train, on what, and where to put it.

    Attributes:
        target: whose head. corpus: texts, or prompts that wait for answers. out: the head's folder.
        config: the recipe. shape: of the head (its draft vocabulary's size may shrink to the target's).
        start: its first weights.
        answers: settings and source of answers; ``None`` keeps those of the file.
        taps: ``live`` runs the target for each batch, ``store`` writes shards first.
        max_length: most tokens of a text. num_held_out: texts kept for measuring; held_out_tokens: decoded of each.
        summary: where the data came from, for the head's folder. is_resumed: go on from the state in ``out``.
    """

    target: LoadedTarget
    corpus: Corpus
    out: Path
    config: TrainConfig
    shape: EagleConfig
    start: Start = field(default_factory=Start)
    answers: tuple[AnswerSettings, AnswerSource] | None = None
    taps: Literal["live", "store"] = "live"
    disk_budget_bytes: int = 20 * 10**9
    max_length: int = 2048
    num_held_out: int = 16
    held_out_tokens: int = 64
    summary: dict[str, Any] = field(default_factory=dict)
    is_resumed: bool = False

    @property
    def work(self) -> Path:
        """Where everything lies that is not the head."""
        return self.out / "training"


def train_eagle(job: Job, report: Reporter) -> Acceptance | None:
    """Train a head; returns what the best one was measured at (``None`` without held-out texts).

    Raises:
        ConfigError, DataError: options, files or numbers that cannot be; the text says which.
    """
    _check_folder(job)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold(job.work / ".lock"))
        except BlockingIOError:
            raise ConfigError(f"{job.out}: another run trains there now; wait for it, or give another --out") from None
        return _train(job, report)


def _train(job: Job, report: Reporter) -> Acceptance | None:
    if not job.corpus.texts:
        check_any_trained(0, job.corpus.skipped, "the file")
    _forecast(job, report)
    texts = _usable(job, _answered(job, report), report)
    train_texts, held_texts = split_held_out(texts, min(job.num_held_out, len(texts) // 5), seed=job.config.seed)
    vocabulary = _vocabulary(job, train_texts)
    report.say(
        f"draft vocabulary: {len(vocabulary.ids)} of {vocabulary.target_size} tokens, "
        f"{100 * vocabulary.coverage:.2f} % of the trained tokens"
    )
    source = _states(job, train_texts, report)
    return _Run(job, report, train_texts, held_texts, vocabulary, source).run()


def _vocabulary(job: Job, texts: Sequence[Text]) -> DraftVocabulary:
    """The most frequent tokens, or those of the head that training begins with."""
    target_size = job.target.spec.vocab_size
    if job.start.head is None:
        return choose_vocabulary(texts, size=job.shape.draft_vocab_size, target_size=target_size)
    return vocabulary_of(job.start.head.head.target_ids().tolist(), texts, target_size=target_size)


def _check_folder(job: Job) -> None:
    has_state = (job.work / "state.pt").exists()
    if has_state and not job.is_resumed:
        raise ConfigError(f"{job.out} holds a training run; give --resume to go on with it, or another --out")
    if job.is_resumed and not job.work.exists():
        raise ConfigError(f"{job.out} holds no training run to go on with; leave --resume out")
    job.work.mkdir(parents=True, exist_ok=True)


def _forecast(job: Job, report: Reporter) -> None:
    tokens = job.answers[0].max_tokens if job.answers is not None else 0
    batch_size = job.answers[0].batch_size if job.answers is not None else 1
    plan = Plan(answer_tokens=tokens, batch_size=batch_size, is_stored=job.taps == "store")
    sample = [text for text in job.corpus.texts if tokens or rows_of(text).queries]
    if not sample:
        check_any_trained(0, job.corpus.skipped, "the file")
    forecast = run_trial(job.target, sample, job.shape, job.config, plan)
    longest = ", were every answer of the greatest length" if tokens else ""
    report.say(forecast.to_text() + longest)


def _answered(job: Job, report: Reporter) -> list[Text]:
    if job.answers is None:
        return list(job.corpus.texts)
    settings, source = job.answers
    total, tokens = len(job.corpus.texts), 0

    def on_answer(done: int, num_tokens: int) -> None:
        nonlocal tokens
        tokens += num_tokens
        report.progress("answers", done, total, f"{tokens} tokens")

    return answer_all(job.corpus.texts, source, settings, job.work / "answers.jsonl", on_answer=on_answer)


def _usable(job: Job, texts: Sequence[Text], report: Reporter) -> list[Text]:
    """Texts with something to learn from, cut to their greatest length."""
    cut = [text.cut(job.max_length) for text in texts]
    usable = [text for text in cut if rows_of(text).queries]
    skipped: dict[str, Sequence[int]] = dict(job.corpus.skipped)
    short = [text.line for text in cut if not rows_of(text).queries]
    if short:
        skipped["answer of one token"] = short
    num_trained = sum(text.num_trained for text in usable)
    left_out = ", ".join(f"{len(lines)} {reason}" for reason, lines in skipped.items()) or "none"
    report.say(f"{len(usable)} texts, {num_trained} trained tokens; rows left out: {left_out}")
    check_any_trained(num_trained, skipped, "the file")
    return usable


def _states(job: Job, texts: Sequence[Text], report: Reporter) -> StateSource:
    live = LiveStates(target=job.target, tap_layers=job.shape.tap_layers, num_law_tokens=job.config.num_law_tokens)
    if job.taps == "live":
        return live
    report.say(f"taps of {len(texts)} texts take {live.stored_bytes(texts) / 1e9:.3f} GB of disk")
    stored = capture_shards(
        job.work / "taps",
        texts,
        live,
        disk_budget_bytes=job.disk_budget_bytes,
        on_texts=lambda done: report.progress("taps", done, len(texts)),
    )
    report.say(f"taps: {stored.num_bytes / 1e9:.3f} GB stored")
    return stored


class _Run:
    """The updates, with what happens between them."""

    def __init__(
        self,
        job: Job,
        report: Reporter,
        texts: list[Text],
        held_texts: list[Text],
        vocabulary: DraftVocabulary,
        source: StateSource,
    ) -> None:
        self._job, self._report, self._texts, self._held = job, report, texts, held_texts
        self._vocabulary, self._source = vocabulary, source
        self._digest = hashlib.sha256(json.dumps([text.tokens for text in texts]).encode()).hexdigest()[:32]
        config = job.config
        head = EagleHead(replace(job.shape, draft_vocab_size=len(vocabulary.ids)))
        initialise(head, vocabulary.ids, job.target.checkpoint, job.start, seed=config.seed)
        schedule = Schedule(
            texts,
            batch_positions=config.batch_positions,
            num_epochs=config.num_epochs,
            max_positions=config.max_positions,
            seed=config.seed,
        )
        self._dtype = job.target.placement.activation_dtype
        self._trainer = Trainer(
            head,
            schedule,
            source=source,
            draft_index_V=vocabulary.draft_index(),
            config=config,
            dtype=self._dtype,
        )
        self._every = config.evaluate_every or max(1, -(-len(schedule) // 10))
        self._log = job.work / "log.jsonl"
        self._best = 0.0
        self._best_acceptance: Acceptance | None = None
        self._positions = 0
        self._rate = 0.0

    def run(self) -> Acceptance | None:
        """All updates that are left."""
        trainer, total = self._trainer, len(self._trainer.schedule)
        recipe = self._recipe()
        if (self._job.work / "state.pt").exists():
            self._go_on(recipe)
        self._statistics = self._hidden_statistics()
        self._rate = matrix_rate(trainer.head.config, self._job.config.batch_positions, self._dtype)
        saved_at = time.monotonic()
        recent: list[UpdateReport] = []
        while not trainer.is_done:
            recent.append(trainer.step())
            self._positions += recent[-1].num_queries
            self._report.progress("training", trainer.update, total, self._note(recent))
            if trainer.update % _LOG_EVERY == 0 or trainer.is_done:
                self._log_updates(recent)
                recent = []
            if trainer.update % self._every == 0 or trainer.is_done:
                self._evaluate()
            elif time.monotonic() - saved_at < self._job.config.save_every_s:
                continue
            save_state(self._job.work / "state.pt", trainer, recipe=recipe, best=self._best)
            saved_at = time.monotonic()
        self._finish()
        return self._best_acceptance

    def _go_on(self, recipe: dict[str, Any]) -> None:
        self._best = load_state(self._job.work / "state.pt", self._trainer, recipe=recipe)
        update = self._trainer.update
        kept = [line for line in read_lines(self._log) if line["update"] <= update]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_file(self._log, lambda path: path.write_text(text, encoding="utf-8"))
        schedule = self._trainer.schedule
        self._positions = sum(len(rows_of(t).queries) for index in range(update) for t in schedule.batch(index))
        self._report.say(f"going on behind update {update} of {len(schedule)}")

    def _recipe(self) -> dict[str, Any]:
        """What a run is; another one cannot be gone on with. How often to evaluate or save is no part of it."""
        job = self._job
        plain = {k: v for k, v in job.config.to_json().items() if k not in ("evaluate_every", "save_every_s")}
        return {
            **plain,
            "init": job.start.name,
            "head": json.dumps(self._trainer.head.config.to_json()),
            "target": job.target.spec.fingerprint,
            "texts": self._digest,
            "dtype": str(self._dtype),
        }

    def _note(self, recent: Sequence[UpdateReport]) -> str:
        last = recent[-1]
        best = f", best {self._best:.2f} tokens a pass" if self._best else ""
        return f"epoch {last.epoch + 1}, loss {last.loss:.3f}{best}"

    def _log_updates(self, recent: Sequence[UpdateReport]) -> None:
        last = recent[-1]
        compute_s, states_s = sum(r.compute_s for r in recent), sum(r.states_s for r in recent)
        flop_rate = sum(r.num_flop for r in recent) / compute_s
        append_line(
            self._log,
            {
                "kind": "update",
                "update": last.update,
                "epoch": last.epoch,
                "positions": self._positions,
                "loss": last.loss,
                "step_losses": [round(loss, 5) for loss in last.step_losses],
                "gradient_norm": round(last.gradient_norm, 5),
                "learning_rate": last.learning_rate,
                "masked_positions_per_s": round(sum(r.num_queries for r in recent) / (compute_s + states_s), 1),
                "all_positions_per_s": round(sum(r.num_keys for r in recent) / (compute_s + states_s), 1),
                "states_share": round(states_s / (compute_s + states_s), 4),
                "model_gflop_per_s": round(flop_rate / 1e9, 1),
                "share_of_matrix_rate": round(flop_rate / self._rate, 4),
            },
        )

    def _evaluate(self) -> None:
        job, trainer = self._job, self._trainer
        if not self._held:
            self._save_head({})
            return
        self._report.progress("training", trainer.update, len(trainer.schedule), "evaluating")
        drafter = head_drafter(trainer.head, job.target)
        prompts = [prompt_tokens(text) for text in self._held]
        found = decode_held_out(job.target, drafter, prompts, max_tokens=job.held_out_tokens)
        live = LiveStates(target=job.target, tap_layers=job.shape.tap_layers, num_law_tokens=1)
        batch = load_batch(self._held, live, self._vocabulary.draft_index(), num_steps=4)
        forced = [round(share, 4) for share in forced_agreement(trainer.unrolled, batch, 4)]
        measured = {**found.to_json(), "agreement_along_texts": forced}
        where = {"kind": "evaluation", "update": trainer.update, "positions": self._positions}
        append_line(self._log, {**where, **measured})
        is_best = found.tokens_per_pass > self._best
        if is_best:
            self._best, self._best_acceptance = found.tokens_per_pass, found
            self._save_head(
                {**measured, "measured_at_update": trainer.update, "target_precision": job.target.spec.precision}
            )
        rates = " ".join(f"{rate:.2f}" for rate in found.rates)
        self._report.say(
            f"update {trainer.update}, {self._positions} positions: {found.tokens_per_pass:.3f} tokens a pass, "
            f"kept by depth {rates}{' (best)' if is_best else ''}"
        )
        write_curves(job.out, f"Training of {job.out.name}", read_lines(self._log))

    def _save_head(self, acceptance: dict[str, Any]) -> None:
        job = self._job
        data = {
            **job.summary,
            "texts": len(self._texts),
            "trained tokens": sum(text.num_trained for text in self._texts),
            "held-out texts": len(self._held),
            "draft vocabulary covers": round(self._vocabulary.coverage, 5),
        }
        training = {**self._recipe(), "positions": self._positions}
        info = HeadInfo.for_target(
            job.target,
            data=data,
            training=training,
            hidden_statistics=self._statistics,
            acceptance=acceptance,
            record=self._record(),
        )
        save_head(job.out, self._trainer.head, info, dtype=torch.bfloat16)

    def _hidden_statistics(self) -> dict[str, Any]:
        """Of each tap over a few texts: a changed target shows itself here."""
        states = self._source.states(self._texts[:32])
        taps_RD = torch.cat([state.taps_SD for state in states])
        layers = self._job.shape.tap_layers
        pieces = zip(layers, taps_RD.chunk(len(layers), dim=-1), strict=True)
        return {"positions": len(taps_RD), **{f"tap {layer}": tap_statistics(piece) for layer, piece in pieces}}

    def _record(self) -> dict[str, Any]:
        """What the head is made of, and what answers look like (those held out, if there are any)."""
        tokenizer = self._job.target.tokenizer
        answers = [text.answer_tokens() for text in self._held or self._texts]
        texts = [] if tokenizer is None else [tokenizer.decode(answer) for answer in answers]
        common = common_tokens(text.answer_tokens() for text in self._texts)
        known = answer_statistics(answers, texts, draft_ids=self._vocabulary.ids, common_ids=common)
        stored = {name: tensor.to(torch.bfloat16) for name, tensor in self._trainer.head.named_parameters()}
        return {"tensors": tensor_statistics(stored), "answers": {**known, "common_ids": common}}

    def _finish(self) -> None:
        names = write_curves(self._job.out, f"Training of {self._job.out.name}", read_lines(self._log))
        lines = [line for line in read_lines(self._log) if line["kind"] == "update"]
        if lines:
            last = lines[-1]
            self._report.say(
                f"{last['masked_positions_per_s']:.0f} loss-masked positions/s, {last['model_gflop_per_s']:.0f} GFLOP/s, "
                f"{100 * last['share_of_matrix_rate']:.0f} % of the matrix rate of {self._rate / 1e9:.0f} GFLOP/s"
            )
        png = "" if "curves.png" in names else " (no curves.png: matplotlib is not installed)"
        self._report.say(f"{self._job.out}: the head, README.md, {', '.join(names)}{png}")
