"""Shape of an EAGLE-3 head, and the options in which public heads differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from outrider.errors import WeightsError, nearest
from outrider.models.config import LlamaConfig, RopeConfig

__all__ = ["EagleConfig", "default_taps"]


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The three layers that the authors tap: low, middle, high. Index i is the residual stream *before* layer i."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Shape of a head.

    Attributes:
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_width, num_layers: of the head's own layers.
        norm_eps, rope: as in the target's layers.
        max_positions: longest text that the head was trained on; drafting looks back no further.
        target_hidden_size: width of a tap. Unless the head brings an embedding of its own, also ``hidden_size``.
        target_vocab_size, draft_vocab_size: V and U; the head predicts U of the target's V tokens.
        tap_layers: which taps are fused, in this order; index i is the residual stream before target layer i (0 the
            embeddings, the target's number of layers its last output), un-normed.
        norm_before_residual: the first layer's residual is the normed feature, not the feature itself.
        norm_before_fc: one RMS norm over all taps together before they are fused (tensor ``input_norm.weight``).
        fc_norm: one RMS norm for each tap before they are fused (``fc_norm.0.weight``, ...); not with the former.
        norm_output: the output goes through the final norm before it stands in for the next entry's feature.
        fc_bias: the fusing matrix has a bias.

    Raises:
        WeightsError: numbers that make no head; the text names the key, its value and what is allowed.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    target_hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int
    tap_layers: tuple[int, ...]
    num_layers: int = 1
    norm_eps: float = 1e-5
    max_positions: int = 2048
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer of 1 or more")
        _require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, "a multiple of num_kv_heads")
        _require(self.head_width % 2 == 0, "head_width", self.head_width, "an even number")
        _require(self.norm_eps > 0, "norm_eps", self.norm_eps, "a number above 0")
        _require(
            self.draft_vocab_size <= self.target_vocab_size,
            "draft_vocab_size",
            self.draft_vocab_size,
            f"at most target_vocab_size, {self.target_vocab_size}",
        )
        taps = self.tap_layers
        is_list = len(taps) > 0 and all(_is_int(tap) and tap >= 0 for tap in taps) and len(set(taps)) == len(taps)
        _require(is_list, "tap_layers", list(taps), "different layer indexes of 0 or more")
        _require(not (self.fc_norm and self.norm_before_fc), "fc_norm", True, "one of fc_norm and norm_before_fc")

    @property
    def num_taps(self) -> int:
        """How many hidden states are fused."""
        return len(self.tap_layers)

    @staticmethod
    def for_target(target: LlamaConfig, *, draft_vocab_size: int, **changes: Any) -> EagleConfig:
        """A head with the shape of one layer of this target; ``changes`` are fields of this class."""
        _refuse_unknown(changes, "a head's config")
        values = {
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_width": target.head_width,
            "target_hidden_size": target.hidden_size,
            "target_vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "tap_layers": default_taps(target.num_layers),
            "norm_eps": target.norm_eps,
            "rope": target.rope,
        }
        return EagleConfig(**{**values, **changes})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "tap_layers": list(self.tap_layers)}

    @staticmethod
    def from_json(values: Mapping[str, Any], where: str) -> EagleConfig:
        """Read what :meth:`to_json` wrote.

        Args:
            values: the object; where: the file, for error texts.

        Raises:
            WeightsError: an unknown or missing key, or a value that is not possible.
        """
        _refuse_unknown(values, where)
        for known in fields(EagleConfig):
            if known.name not in values and known.default is known.default_factory is MISSING:
                raise WeightsError(f"{where}: {known.name} is missing")
        try:
            given = {name: _checked_kind(name, value) for name, value in values.items()}
            return EagleConfig(**given)
        except WeightsError as error:
            raise WeightsError(f"{where}: {error}") from None


_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_width",
    "num_layers",
    "max_positions",
    "target_hidden_size",
    "target_vocab_size",
    "draft_vocab_size",
)
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias")


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    known = [each.name for each in fields(EagleConfig)]
    for name in values:
        if name not in known:
            raise WeightsError(f"{where}: key {name!r} is unknown{nearest(name, known)}; allowed: {', '.join(known)}")


def _checked_kind(name: str, value: Any) -> Any:
    """The value as the field holds it."""
    if name == "tap_layers":
        _require(isinstance(value, list | tuple), name, value, "a list of layer indexes")
        return tuple(value)
    if name == "rope":
        return _rope(value)
    if name in _FLAGS:
        _require(isinstance(value, bool), name, value, "true or false")
    if name == "norm_eps":
        _require(isinstance(value, float), name, value, "a number above 0")
    return value


def _rope(value: Any) -> RopeConfig:
    known = {each.name for each in fields(RopeConfig)}
    _require(
        isinstance(value, Mapping) and set(value) <= known, "rope", value, f"an object of {', '.join(sorted(known))}"
    )
    numbers = {name: number for name, number in value.items() if name != "kind"}
    are_numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers.values())
    _require(are_numbers, "rope", value, "numbers above 0")
    kinds = ("default", "linear", "llama3")
    _require(value.get("kind", "default") in kinds, "rope kind", value.get("kind"), ", ".join(kinds))
    return RopeConfig(**value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, given: object, allowed: str) -> None:
    if not holds:
        raise WeightsError(f"{name} is {given!r}; allowed: {allowed}")
