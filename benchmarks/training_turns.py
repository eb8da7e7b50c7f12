"""Updates of training, native and not, in turns with the rate of plain matrix products: what ``train_speed`` runs.

The rate of matrix products changes by a factor of two from minute to minute on some machines. So it is probed before and
behind every turn, with the very function that a training run uses, and a turn's share is taken of the two probes next to
it. Both arms do the same updates of the same texts; every batch is done once before the clock runs, as products of shapes
that are new to the process are slow the first time, and a long run meets few of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Bar
from benchmarks.stats import alternate, paired_ratio, spread
from outrider.cli.inputs import read_file
from outrider.device import set_num_threads
from outrider.drafters.eagle_config import EagleConfig
from outrider.drafters.eagle_head import EagleHead
from outrider.errors import ConfigError
from outrider.models.base import LoadedTarget
from outrider.native.training import training_kernels
from outrider.traffic import read_rows
from outrider.train.answers import AnswerSettings, EngineAnswers, answer_all
from outrider.train.capture import LiveStates, StateSource
from outrider.train.config import TrainConfig
from outrider.train.corpus import Text, check_any_trained, read_corpus
from outrider.train.data import Schedule, choose_vocabulary
from outrider.train.forecast import matrix_rate
from outrider.train.loop import Trainer, UpdateReport
from outrider.train.packing import TextStates, rows_of
from outrider.train.start import Start, initialise

__all__ = [
    "Cell",
    "KeptStates",
    "Material",
    "Turn",
    "bar_of",
    "kernels_of",
    "measure_cell",
    "native_kernels",
    "prepare",
    "summary_of",
]

LIMIT = 0.55
NUM_BATCHES = 6
"""Different batches of a cell; turns go round them."""
_MAX_LENGTH = 2048
_SWITCH = "OUTRIDER_NATIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Settings that are measured together: loss-masked positions an update, draft entries, threads."""

    batch_positions: int
    draft_vocab: int
    threads: int

    @property
    def name(self) -> str:
        """As bars call it."""
        threads = f"{self.threads} thread" + "s" * (self.threads != 1)
        return f"training, {self.batch_positions:,} positions an update, {self.draft_vocab:,} draft entries, {threads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some updates of one arm, between two probes.

    Attributes:
        arm: ``native`` or ``pytorch``. turn: its number, the same for both arms of a pair.
        num_queries: loss-masked positions; num_keys: positions processed.
        num_flop: of the head's matrices, forward and backward, of positions that they are applied to.
        compute_s: seconds of the updates; states_s: of fetching and packing what the target said, from memory.
        probes: operations a second of plain matrix products, before and behind.
        loss: of the last update.
    """

    arm: str
    turn: int
    num_queries: int
    num_keys: int
    num_flop: float
    compute_s: float
    states_s: float
    probes: tuple[float, float]
    loss: float

    @property
    def flop_rate(self) -> float:
        """Operations a second, as ``model_gflop_per_s`` of a training log counts them."""
        return self.num_flop / self.compute_s

    @property
    def matrix_rate(self) -> float:
        """What the two probes say on average."""
        return sum(self.probes) / 2

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute_s + self.states_s


class KeptStates:
    """What the target said of some texts, in memory: updates are timed, not the target and not a disk.

    Args:
        texts: those that will be asked for. source: is asked once.
    """

    def __init__(self, texts: Sequence[Text], source: StateSource) -> None:
        self._of: dict[str, TextStates] = {
            text.id: state for text, state in zip(texts, source.states(texts), strict=True)
        }

    def states(self, texts: Sequence[Text]) -> list[TextStates]:
        """As :class:`outrider.train.capture.StateSource` has it."""
        return [self._of[text.id] for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What heads are trained on: a target, texts with its answers, what it says of them."""

    target: LoadedTarget
    texts: tuple[Text, ...]
    states: KeptStates

    @property
    def num_queries(self) -> int:
        """Loss-masked positions of all texts."""
        return sum(len(rows_of(text).queries) for text in self.texts)

    def to_json(self) -> dict[str, int]:
        """Counts."""
        num_keys = sum(rows_of(text).num_keys for text in self.texts)
        return {"texts": len(self.texts), "positions": num_keys, "loss_masked_positions": self.num_queries}


def prepare(target: LoadedTarget, traffic: Path, answers: Path, *, limit: int, max_answer_tokens: int) -> Material:
    """Let the target answer the first rows of the traffic, as a training run does, and keep what it says of these texts.

    Args:
        target: whose head would be trained. traffic: JSON Lines of prompts.
        answers: file of answers, made or continued. limit: rows used. max_answer_tokens: most tokens of an answer.

    Raises:
        ConfigError, DataError: rows that cannot be read, or leave nothing to train on.
    """
    if target.tokenizer is None:
        raise ConfigError("this target has no tokenizer, and traffic is text")
    inputs = read_rows(read_file(traffic), name=str(traffic))
    inputs = replace(inputs, rows=inputs.rows[:limit])
    max_length = min(_MAX_LENGTH, target.spec.max_positions)
    corpus = read_corpus(inputs, target.tokenizer, wants_answers=True, max_length=max_length)
    settings = AnswerSettings(max_tokens=max_answer_tokens)
    answered = answer_all(corpus.texts, EngineAnswers(target, batch_size=settings.batch_size), settings, answers)
    texts = tuple(text for text in (each.cut(max_length) for each in answered) if rows_of(text).queries)
    check_any_trained(len(texts), corpus.skipped, str(traffic))
    shape = EagleConfig.for_target(target.checkpoint.config, draft_vocab_size=1)
    live = LiveStates(target=target, tap_layers=shape.tap_layers, num_law_tokens=TrainConfig().num_law_tokens)
    return Material(target=target, texts=texts, states=KeptStates(texts, live))


def native_kernels() -> str:
    """The instruction set that the native arm runs on.

    Raises:
        ConfigError: there is none, so that both arms would be the same.
    """
    context = training_kernels()
    if context is None:
        raise ConfigError(
            "training has no native kernels here (a processor without AMX, no compiler, or OUTRIDER_NATIVE=off); "
            "give --arm pytorch, or an instruction set of this processor, as OUTRIDER_NATIVE=avx512"
        )
    return context.kernels


@contextmanager
def kernels_of(arm: str) -> Iterator[None]:
    """Inside, training runs as this arm does: ``pytorch`` without native kernels, ``native`` as the user has it."""
    given = os.environ.get(_SWITCH)
    if arm == "pytorch":
        os.environ[_SWITCH] = "off"
    try:
        yield
    finally:
        os.environ.pop(_SWITCH, None)
        if given is not None:
            os.environ[_SWITCH] = given


class _Arm:
    """One trainer and the batches that it goes round."""

    def __init__(self, arm: str, trainer: Trainer, batches: Sequence[int]) -> None:
        self.arm, self._trainer, self._batches = arm, trainer, batches

    def probe(self) -> float:
        """Operations a second of plain products at the head's shapes."""
        dtype = self._trainer.unrolled.dtype
        return matrix_rate(self._trainer.head.config, self._trainer.config.batch_positions, dtype)

    def warm_up(self) -> None:
        """Every batch once."""
        self.run(0, len(self._batches), 0.0)

    def run(self, turn: int, num_updates: int, before: float) -> Turn:
        """The updates of a turn; then the probe behind it, which begins the next."""
        with kernels_of(self.arm):
            reports = [self._update(turn * num_updates + index) for index in range(num_updates)]
        return Turn(
            arm=self.arm,
            turn=turn,
            num_queries=sum(report.num_queries for report in reports),
            num_keys=sum(report.num_keys for report in reports),
            num_flop=sum(report.num_flop for report in reports),
            compute_s=sum(report.compute_s for report in reports),
            states_s=sum(report.states_s for report in reports),
            probes=(before, self.probe()),
            loss=reports[-1].loss,
        )

    def _update(self, index: int) -> UpdateReport:
        self._trainer.update = self._batches[index % len(self._batches)]
        return self._trainer.step()


def measure_cell(cell: Cell, material: Material, *, arms: Sequence[str], turns: int, updates: int) -> list[Turn]:
    """All turns of a cell, arms beside each other and taking turns in going first.

    Args:
        cell: the settings. material: what to train on. arms: of ``native`` and ``pytorch``.
        turns: of each arm. updates: of a turn.

    Raises:
        ConfigError: texts that do not fill one update.
    """
    before_threads = torch.get_num_threads()
    set_num_threads(cell.threads)
    try:
        runners = {arm: _runner(arm, cell, material) for arm in arms}
        for runner in runners.values():
            runner.warm_up()
        done: list[Turn] = []
        probe = runners[arms[0]].probe()
        for turn in range(turns):
            for arm in alternate(arms, turn):
                done.append(runners[arm].run(turn, updates, probe))
                probe = done[-1].probes[1]
        return done
    finally:
        set_num_threads(before_threads)


def _runner(arm: str, cell: Cell, material: Material) -> _Arm:
    """A trainer as a run makes it: same weights, same recipe, same orders for all arms."""
    target = material.target
    size = min(cell.draft_vocab, target.spec.vocab_size)
    vocabulary = choose_vocabulary(material.texts, size=size, target_size=target.spec.vocab_size)
    head = EagleHead(EagleConfig.for_target(target.checkpoint.config, draft_vocab_size=size))
    config = TrainConfig(batch_positions=cell.batch_positions)
    initialise(head, vocabulary.ids, target.checkpoint, Start(), seed=config.seed)
    schedule = Schedule(
        material.texts,
        batch_positions=cell.batch_positions,
        num_epochs=NUM_BATCHES,
        max_positions=None,
        seed=config.seed,
    )
    trainer = Trainer(
        head,
        schedule,
        source=material.states,
        draft_index_V=vocabulary.draft_index(),
        config=config,
        dtype=target.placement.activation_dtype,
    )
    return _Arm(arm, trainer, _full_batches(schedule, cell, material))


def _full_batches(schedule: Schedule, cell: Cell, material: Material) -> list[int]:
    """The first updates that are full; what is left over at the end of an epoch is rare in a long run."""
    if material.num_queries < cell.batch_positions:
        raise ConfigError(
            f"the texts hold {material.num_queries} loss-masked positions, not one update of {cell.batch_positions}; "
            "give more rows (--limit), or smaller --batch-positions"
        )
    sizes = [sum(len(rows_of(text).queries) for text in schedule.batch(i)) for i in range(len(schedule))]
    return [index for index, size in enumerate(sizes) if size >= cell.batch_positions][:NUM_BATCHES]


def summary_of(cell: Cell, turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians and quartiles of each arm, its share of the matrix rate turn by turn, and the turns themselves."""
    by_arm: dict[str, list[Turn]] = {}
    for turn in turns:
        by_arm.setdefault(turn.arm, []).append(turn)
    summary: dict[str, Any] = {
        **asdict(cell),
        "probe_gflop_per_s": spread([turns[0].probes[0] / 1e9, *(t.probes[1] / 1e9 for t in turns)]).to_json(),
        "arms": {arm: _spreads(each) for arm, each in by_arm.items()},
        "turns": [asdict(turn) for turn in turns],
    }
    if len(by_arm) == 2:
        seconds = {arm: [t.seconds for t in sorted(each, key=lambda t: t.turn)] for arm, each in by_arm.items()}
        summary["speed_up"] = paired_ratio(seconds["pytorch"], seconds["native"]).to_json()
    return summary


def _spreads(turns: Sequence[Turn]) -> dict[str, Any]:
    values: Mapping[str, list[float]] = {
        "share_of_matrix_rate": [turn.flop_rate / turn.matrix_rate for turn in turns],
        "model_gflop_per_s": [turn.flop_rate / 1e9 for turn in turns],
        "masked_positions_per_s": [turn.num_queries / turn.seconds for turn in turns],
        "all_positions_per_s": [turn.num_keys / turn.seconds for turn in turns],
    }
    return {name: spread(each).to_json() for name, each in values.items()}


def bar_of(cell: Cell, turns: Sequence[Turn]) -> Bar:
    """The native arm's share of the matrix rate, median over its turns, against the bar."""
    mine = [turn for turn in turns if turn.arm == "native"]
    share = paired_ratio([turn.flop_rate for turn in mine], [turn.matrix_rate for turn in mine])
    return Bar(
        name=cell.name,
        value=share.value,
        limit=LIMIT,
        unit="of the matrix rate",
        low=share.low,
        high=share.high,
        pairs=share.pairs,
    )
