"""All arms: which engine, which copy of the weights, which kind of speculation, and which plain arm it is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ConfigError, nearest

__all__ = ["PEERS", "REFERENCE", "Arm", "all_arms", "choose", "drafter_arms"]

PEERS = ("transformers", "llamacpp", "openvino", "vllm", "outrider")
REFERENCE = "outrider-bf16-plain"
"""The arm whose output all others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to decode.

    Attributes:
        name: what tables and ``--only`` call it.
        peer: the engine, one of ``PEERS``.
        weights: which copy of the weights it reads, a key of its peer's setup.
        plain: the arm without speculation that its speed-up is taken over; itself for a plain arm.
        options: what its driver is told.
    """

    name: str
    peer: str
    weights: str
    plain: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """True for an arm that does not speculate."""
        return self.plain == self.name


# The server's own default is ngram-mod with its own numbers. The "short" ones fit answers of a hundred or two tokens, which
# the others' long keys and drafts (12 and 48 tokens, 24 and 64) hardly ever match.
LLAMA_SPECULATION: dict[str, tuple[str, ...]] = {
    "default": ("--spec-default",),
    "simple": ("--spec-type", "ngram-simple"),
    "map-k": ("--spec-type", "ngram-map-k"),
    "map-k4v": ("--spec-type", "ngram-map-k4v"),
    "cache": ("--spec-type", "ngram-cache"),
    "simple-short": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
    ),
    "map-k-short": (
        *("--spec-type", "ngram-map-k"),
        *("--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "8"),
    ),
    "mod-short": (
        *("--spec-type", "ngram-mod"),
        *("--spec-ngram-mod-n-match", "4", "--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "8"),
    ),
}
VLLM_SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
}


def all_arms(*, num_draft_tokens: int, drafters: Sequence[str] = ()) -> list[Arm]:
    """Every arm, peers first, Outrider last.

    Args:
        num_draft_tokens: most draft tokens a step of Outrider.
        drafters: drafter specs of Outrider beside ``suffix``.
    """
    return [
        *_transformers(),
        *_llamacpp(),
        *_openvino(),
        *_vllm(),
        *drafter_arms(("none", "suffix", *drafters), num_draft_tokens=num_draft_tokens),
    ]


def _transformers() -> Iterator[Arm]:
    plain = "transformers-bf16-plain"
    for name, lookup in ((plain, 0), ("transformers-bf16-lookup", 10)):
        yield Arm(name=name, peer="transformers", weights="hf", plain=plain, options={"prompt_lookup": lookup})


def _llamacpp() -> Iterator[Arm]:
    for weights in ("bf16", "q8_0", "q4_1"):
        plain = f"llamacpp-{weights}-plain"
        yield Arm(name=plain, peer="llamacpp", weights=weights, plain=plain, options={"arguments": []})
        for kind, arguments in LLAMA_SPECULATION.items():
            name = f"llamacpp-{weights}-{kind}"
            yield Arm(name=name, peer="llamacpp", weights=weights, plain=plain, options={"arguments": list(arguments)})


def _openvino() -> Iterator[Arm]:
    for weights in ("fp16", "int8"):
        plain = f"openvino-{weights}-plain"
        for name, lookup in ((plain, 0), (f"openvino-{weights}-lookup", 5)):
            options = {"prompt_lookup": lookup, "max_ngram": 3}
            yield Arm(name=name, peer="openvino", weights=weights, plain=plain, options=options)


def _vllm() -> Iterator[Arm]:
    plain = "vllm-bf16-plain"
    yield Arm(name=plain, peer="vllm", weights="hf", plain=plain, options={"speculative": None})
    for kind, config in VLLM_SPECULATION.items():
        yield Arm(name=f"vllm-bf16-{kind}", peer="vllm", weights="hf", plain=plain, options={"speculative": config})


def drafter_arms(drafters: Sequence[str], *, num_draft_tokens: int) -> Iterator[Arm]:
    """Outrider's arms: each drafter in bfloat16 and int8; ``none`` is plain decoding."""
    for precision, short in (("bfloat16", "bf16"), ("int8", "int8")):
        plain = f"outrider-{short}-plain"
        for drafter in dict.fromkeys(drafters):
            name = plain if drafter == "none" else f"outrider-{short}-{drafter}"
            options = {"precision": precision, "drafter": drafter, "num_draft_tokens": num_draft_tokens}
            yield Arm(name=name, peer="outrider", weights="own", plain=plain, options=options)


def choose(arms: Sequence[Arm], wanted: Sequence[str]) -> list[Arm]:
    """The arms of that name or of that peer, in their order; all if nothing is named.

    Raises:
        ConfigError: a name that is neither.
    """
    known = [*PEERS, *(arm.name for arm in arms)]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"arm {name!r} is unknown{nearest(name, known)}; --list shows all")
    return [arm for arm in arms if not wanted or arm.name in wanted or arm.peer in wanted]
