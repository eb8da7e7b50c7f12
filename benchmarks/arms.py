"""The arms of a comparison: our engine with or without a drafter, and transformers' ``generate`` on the same weights."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.prompts import PromptRow, encode, load_group
from benchmarks.stats import alternate
from outrider.device import resolve_placement
from outrider.drafters.build import make_drafter
from outrider.engine.config import EngineConfig
from outrider.engine.engine import Engine
from outrider.models.base import LoadedTarget
from outrider.models.checkpoint import Checkpoint
from outrider.models.load import build_target, load_checkpoint
from outrider.sampling.params import SamplingParams

__all__ = ["MODEL", "Bench", "Comparison", "Run", "Settings", "TransformersArm", "progress_bar", "run_engine"]

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run measures with; saved with its result.

    Attributes:
        model: alias, folder or hub id of the target.
        backend: who runs its passes: auto, native or pytorch.
        tokens: new tokens a request.
        num_draft_tokens: most draft tokens a step.
        traffic: folder of normalised prompt files, ``None`` to fetch.
        full: the whole Spec-Bench instead of its subset.
        pairs: pairs or repeats of every section; ``None`` for each section's own number.
        limit: prompts of each group; ``None`` for all.
        seed: keys sampled requests, bootstrap and order of the arms.
        drafts: what the section ``drafts`` compares: drafter specs, each with its own most draft tokens behind an @.
    """

    model: str = MODEL
    backend: str = "auto"
    tokens: int = 256
    num_draft_tokens: int = 8
    traffic: Path | None = None
    full: bool = False
    pairs: int | None = None
    limit: int | None = None
    seed: int = 0
    drafts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values; the path of the traffic folder says nothing and is left out (its content is pinned)."""
        names = ("model", "backend", "tokens", "num_draft_tokens", "full", "pairs", "limit", "seed")
        drafts = {"drafts": list(self.drafts)} if self.drafts else {}
        return {name: getattr(self, name) for name in names} | drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request as one arm ran it.

    Attributes:
        tokens: output ids. decoded: tokens of decode passes (all but the one that the prompt's pass gives).
        first_s: seconds to the first token; decode_s: seconds from there to the end, everything included.
    """

    tokens: tuple[int, ...]
    decoded: int
    first_s: float
    decode_s: float
    passes: int = 0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds of decoding a token."""
        return self.decode_s * 1e3 / max(1, self.decoded)


def progress_bar(title: str) -> Progress:
    """A progress bar on stderr, so that stdout stays clean."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


class Bench:
    """Loads what sections share: the checkpoint once, one target a precision, prompts as token ids."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._targets: dict[str, LoadedTarget] = {}

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The target's checkpoint; tools are rendered into the system message, as this model's template ignores them."""
        return load_checkpoint(self.settings.model, tool_rendering="system")

    def target(self, precision: str, device: str = "cpu") -> LoadedTarget:
        """The target in a precision; kept for later sections."""
        if precision not in self._targets:
            placement = resolve_placement(precision, device)
            self._targets[precision] = build_target(self.checkpoint, placement, backend=self._backend(precision))
        return self._targets[precision]

    def _backend(self, precision: str) -> str:
        """float32 always runs in PyTorch."""
        return "pytorch" if precision == "float32" else self.settings.backend

    def prompts(self, group: str, *, full: bool = False) -> list[tuple[PromptRow, list[int]]]:
        """Rows of a group (the subset unless ``full``) with their token ids, cut to ``limit``."""
        rows = load_group(group, traffic=self.settings.traffic, full=full)[: self.settings.limit]
        return [(row, encode(self.checkpoint.tokenizer, row)) for row in rows]

    def mixed_prompts(self, count: int) -> list[tuple[PromptRow, list[int]]]:
        """``count`` prompts over the subset's groups in turn, so that every group is there; repeats only when it is used up."""
        groups = [self.prompts(group) for group in ("spec_bench", "humaneval", "copy_heavy", "prose")]
        longest = max(len(group) for group in groups)
        mixed = [group[index] for index in range(longest) for group in groups if index < len(group)]
        return [mixed[index % len(mixed)] for index in range(count)]

    def engine(self, precision: str, drafter: str = "none", *, schedule: str = "adaptive", batch: int = 1) -> Engine:
        """A new engine: no memory of earlier requests, no prefixes kept. ``suffix@16`` drafts up to 16 tokens a step."""
        target = self.target(precision)
        drafter, _, most = drafter.rpartition("@") if "@" in drafter else (drafter, "", self.settings.num_draft_tokens)
        config = EngineConfig.from_dict(
            {
                "num_draft_tokens": int(most),
                "schedule": schedule,
                "max_batch_size": batch,
                "num_cached_prefixes": 0,
            }
        )
        return Engine(target, drafter=make_drafter(drafter, target), config=config, entropy=lambda: self.settings.seed)

    def greedy(self, *, ignore_eos: bool = False) -> SamplingParams:
        """Greedy for ``tokens`` new tokens. Only comparisons of plain decoders ignore the end: loops flatter drafters."""
        return SamplingParams(temperature=0.0, max_tokens=self.settings.tokens, ignore_eos=ignore_eos)


def run_engine(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Run:
    """One request through the engine, timed from outside."""
    begun = time.perf_counter()
    [result] = engine.generate([list(prompt)], params)
    wall_s = time.perf_counter() - begun
    first_s = result.timing.prefill / 1e3
    return Run(
        tokens=result.token_ids,
        decoded=result.stats.committed,
        passes=result.stats.passes,
        first_s=first_s,
        decode_s=wall_s - first_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs of several arms over the same prompts: ``runs[arm][i]`` belongs to ``prompts[i]``."""

    prompts: list[str]
    runs: dict[str, list[Run]]

    def costs(self, arm: str, base: str) -> list[float]:
        """Seconds that ``arm`` needs for as many tokens as ``base`` decoded, pair by pair."""
        pairs = zip(self.runs[arm], self.runs[base], strict=True)
        return [run.ms_per_token * other.decoded / 1e3 for run, other in pairs]

    def ms_per_token(self, arm: str) -> list[float]:
        """Milliseconds a token, run by run."""
        return [run.ms_per_token for run in self.runs[arm]]

    def walls(self, arm: str) -> list[float]:
        """Seconds from the request to its last token, prompt included."""
        return [run.first_s + run.decode_s for run in self.runs[arm]]

    def identical(self, arm: str, base: str) -> str:
        """How many outputs of two arms are equal, token for token."""
        same = sum(a.tokens == b.tokens for a, b in zip(self.runs[arm], self.runs[base], strict=True))
        return f"{same} of {len(self.prompts)}"

    def tokens_per_pass(self, arm: str) -> float:
        """Committed over passes, pooled."""
        return sum(run.decoded for run in self.runs[arm]) / max(1, sum(run.passes for run in self.runs[arm]))

    def part(self, prompts: Collection[str]) -> Comparison:
        """The runs on these prompts only."""
        chosen = [index for index, id in enumerate(self.prompts) if id in prompts]
        return Comparison(
            prompts=[self.prompts[index] for index in chosen],
            runs={arm: [runs[index] for index in chosen] for arm, runs in self.runs.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Raw values, so that every summary can be computed again."""
        arms = {
            arm: {
                "decoded": [run.decoded for run in runs],
                "passes": [run.passes for run in runs],
                "first_s": [round(run.first_s, 4) for run in runs],
                "decode_s": [round(run.decode_s, 4) for run in runs],
            }
            for arm, runs in self.runs.items()
        }
        return {"prompts": self.prompts, "arms": arms}


def compare_engines(
    engines: dict[str, Engine],
    prompts: Sequence[tuple[PromptRow, list[int]]],
    params: SamplingParams,
    *,
    into: Comparison,
    turn: int,
    progress: Any,
) -> None:
    """One round: every prompt through every arm, the arms taking turns in going first."""
    for index, (row, ids) in enumerate(prompts):
        into.prompts.append(row.id)
        for arm in alternate(list(engines), turn + index):
            into.runs.setdefault(arm, []).append(run_engine(engines[arm], ids, params))
        progress()


class _Stamps:
    """A ``generate`` streamer that notes when each token came; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""


class TransformersArm:
    """transformers' ``generate`` on our checkpoint's tensors, eager PyTorch with its default attention."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        config = self._config(checkpoint)
        model = transformers.LlamaForCausalLM(config)
        names = set(checkpoint.tensor_names())
        tensors = {name: checkpoint.tensor(name) for name in model.state_dict() if name in names}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
        self._model = model.to(dtype).eval()

    @staticmethod
    def _config(checkpoint: Checkpoint) -> Any:
        import transformers

        ours = checkpoint.config
        assert ours.rope.kind == "default", "this comparison is for plain rotary embeddings"
        return transformers.LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.hidden_size,
            intermediate_size=ours.intermediate_size,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            num_key_value_heads=ours.num_kv_heads,
            head_dim=ours.head_width,
            rms_norm_eps=ours.norm_eps,
            max_position_embeddings=ours.max_positions,
            tie_word_embeddings=ours.tie_word_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": ours.rope.theta},
            rope_theta=ours.rope.theta,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """Greedy, exactly ``tokens`` new tokens (there is no end token)."""
        stamps = _Stamps()
        ids = torch.tensor([list(prompt)])
        begun = time.perf_counter()
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, streamer=stamps
        )
        first, last = stamps.times[1], stamps.times[-1]
        new = tuple(out[0, len(prompt) :].tolist())
        return Run(tokens=new, decoded=len(new) - 1, passes=len(new) - 1, first_s=first - begun, decode_s=last - first)
