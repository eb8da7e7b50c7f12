"""From a drafter's name on the command line to the drafter.

==================  ==================================================================================================
``none``            no drafter
``ngram``           prompt lookup; options ``max_match``, ``min_match``
``suffix``          suffix decoding; options ``rule`` (tree, chain, paper), ``max_depth``, ``width``, ``min_prob``, ``factor``,
                    ``offset``, ``max_nodes``, ``preload`` (a JSON Lines file of past answers)
``self``            the target itself in int8
``slice:8``         the target's first eight layers with its LM head
``merged:HEAD``     a head's candidates and suffix decoding in one tree; options as for a head
``auto``            what was fastest for this target on the card of a head that came along (``heads/``), else ``suffix``
``auto:A,B``        two or more of the others; for each sequence and step the planner asks one of them (docs/planner.md).
                    Options of a member follow it: ``auto:suffix,HEAD:min_prob=0.2``
``random``          a small model that knows nothing: what a useless drafter costs
``forced``          only tokens that a request's grammar leaves no choice about (every drafter adds these)
``prediction``      only what a request's ``prediction`` says; ``ngram`` and ``suffix`` look there, too
a head              an EAGLE-3 head trained for the target: its folder, or the name of one that came along (``heads/``);
                    chains, or trees if a tree option is given; options besides: ``min_prob`` (drafts less likely to be
                    kept are left out), ``window`` (positions looked back at), ``dtype`` (``bfloat16`` or ``int8`` beside
                    a native target, else ``bfloat16`` or ``float32``)
anything else       a model with the target's tokens: alias, folder, file or hub id
==================  ==================================================================================================

Options follow a colon: ``ngram:max_match=4,min_match=2``. All models and heads take ``depth``, ``width``, ``num_nodes`` and
``min_level`` (:class:`outrider.drafters.tree.TreeShape`), any of which makes them draft trees:
``self:depth=4,width=3,num_nodes=12``, ``slice:8,width=2``, ``merged:heads/mine:num_nodes=9``; and ``dtype``, the precision of
the copy or head: ``self:dtype=int4``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from outrider.device import Placement, Precision
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.forced import ForcedDrafter
from outrider.drafters.head_folder import load_head, refuse_foreign_head
from outrider.drafters.lm import LMDrafter
from outrider.drafters.merge import MergedDrafter
from outrider.drafters.ngram import NGramDrafter
from outrider.drafters.portfolio import portfolio_of
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.preload import read_answers
from outrider.drafters.shipped import best_draft, head_path, shipped_heads
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.tree import TreeShape
from outrider.drafters.vocab import check_vocabulary
from outrider.errors import ConfigError, ModelNotFound, nearest
from outrider.models.base import LoadedTarget
from outrider.models.config import LlamaConfig
from outrider.models.llama import LlamaTarget
from outrider.models.load import load_target
from outrider.models.native import NativeTarget

__all__ = ["DRAFTERS", "make_drafter", "parse_spec", "resolve_draft"]

DRAFTERS = ("none", "ngram", "suffix", "self", "slice", "merged", "auto", "random", "forced", "prediction")
"""Names that are not models."""

_OPTIONS = re.compile(r"(?P<head>.*?)[:,](?P<options>\w+=[^,]*(?:,\w+=[^,]*)*)", re.DOTALL)
_SUFFIX_OPTIONS = ("rule", "max_depth", "width", "min_prob", "factor", "offset", "max_nodes", "preload")
_TREE_OPTIONS: Mapping[str, Callable[[str], Any]] = {"depth": int, "width": int, "num_nodes": int, "min_level": float}
_MERGED_SHAPE = TreeShape(depth=5, width=3, num_nodes=16, min_level=0.25)
"""Of merged trees: what committed most tokens a second (docs/log.md)."""
_HEAD_OPTIONS = (*_TREE_OPTIONS, "min_prob", "window", "dtype")
_WITH_ARGUMENT = ("slice", "merged", "auto")
_RANDOM_WIDTH = 64
_FEWEST_REACHED = 50
"""Steps of a head's evaluation that a rate on its card must rest on."""

T = TypeVar("T", int, float)


def make_drafter(
    spec: str, target: LoadedTarget, *, dtype: str = "auto", tree: TreeShape | None = None, offline: bool = False
) -> Drafter | None:
    """Build a drafter.

    Args:
        spec: see the table above.
        target: the model that is drafted for.
        dtype: precision of a draft model or head, unless ``spec`` names one; ``auto`` is int8 for ``self`` and for heads of
            native int8 targets, bfloat16 for other heads (float32 if the target is), the target's own for models.
        tree: shape of the trees that a draft model drafts; options in ``spec`` change single fields of it.
        offline: look for a draft model on this machine only.

    Raises:
        ConfigError: an unknown drafter or option, or a value out of range.
        ModelError: a draft model that cannot be loaded, or whose tokens are not the target's.
        DataError: a file of past answers that cannot be read.
    """
    spec = resolve_draft(spec, target)
    if spec.partition(":")[0] == "auto":
        made = [make_drafter(each, target, dtype=dtype, tree=tree, offline=offline) for each in _members(spec)]
        return portfolio_of([member for member in made if member is not None], name=spec)
    name, options = parse_spec(spec)
    if name == "none":
        _refuse_unknown(spec, options, ())
        return None
    if name in ("forced", "prediction"):
        _refuse_unknown(spec, options, ())
        return ForcedDrafter() if name == "forced" else PredictionDrafter()
    if name == "ngram":
        return _make_ngram(spec, options)
    if name == "suffix":
        return _make_suffix(spec, options, target)
    kind, _, rest = name.partition(":")
    if kind == "merged":
        return _make_merged(spec, rest, options, target, dtype=dtype, tree=tree)
    folder = head_path(name)
    if folder is not None:
        shape = _tree_shape(spec, options, tree)
        return _make_head(spec, folder, options, target, name=name, dtype=dtype, tree=shape)
    _refuse_unknown(spec, options, (*_TREE_OPTIONS, "dtype"))
    chosen = options.pop("dtype", dtype)
    shape = _tree_shape(spec, options, tree)
    model = _draft_model(name, target, dtype=chosen, offline=offline)
    return LMDrafter(model, name=name, tree=shape, vocab_size=target.spec.vocab_size)


def resolve_draft(spec: str, target: LoadedTarget) -> str:
    """The drafter that ``auto`` stands for with this target; any other name as it is."""
    return best_draft(target) if spec == "auto" else spec


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name (with the ``8`` of ``slice:8``) and options. A model's path may hold colons, and equals signs before them."""
    if not spec.strip():
        raise ConfigError(f"the drafter's name is empty; give one of {', '.join(DRAFTERS)}, or a model")
    found = _OPTIONS.fullmatch(spec)
    if found is None or Path(spec).exists():
        head, separator, rest = spec.partition(":")
        if head in DRAFTERS and head not in _WITH_ARGUMENT and separator:
            raise ConfigError(f"drafter {spec!r}: options are written name=value, not {rest!r}")
        return spec, {}
    options: dict[str, str] = {}
    for part in found["options"].split(","):
        name, _, value = part.partition("=")
        if name in options:
            raise ConfigError(f"drafter {spec!r} gives option {name!r} twice; give it once")
        options[name] = value
    return found["head"], options


def _members(spec: str) -> list[str]:
    """The drafters of ``auto:...``: a piece ``name=value`` is one more option of the member before it."""
    members: list[str] = []
    for piece in spec.removeprefix("auto:").split(","):
        if members and re.fullmatch(r"\w+=.*", piece):
            members[-1] += f",{piece}"
        else:
            members.append(piece)
    for member in members:
        if member.partition(":")[0] in ("none", "auto"):
            raise ConfigError(
                f"drafter {spec!r} cannot choose {member!r}; give drafters that propose, as auto:suffix,HEAD"
            )
    return members


def _refuse_unknown(spec: str, options: Mapping[str, str], allowed: tuple[str, ...]) -> None:
    for name in options:
        if name not in allowed:
            what = f"allowed: {', '.join(allowed)}" if allowed else "it takes none"
            raise ConfigError(f"drafter {spec!r} has an unknown option {name!r}{nearest(name, allowed)}; {what}")


def _number(spec: str, options: Mapping[str, str], name: str, kind: Callable[[str], T], default: T) -> T:
    if name not in options:
        return default
    try:
        return kind(options[name])
    except ValueError:
        words = "an integer" if kind is int else "a number"
        raise ConfigError(f"drafter {spec!r}: option {name} is {words}, not {options[name]!r}") from None


def _make_ngram(spec: str, options: Mapping[str, str]) -> NGramDrafter:
    _refuse_unknown(spec, options, ("max_match", "min_match"))
    min_match = _number(spec, options, "min_match", int, 1)
    return NGramDrafter(
        max_match=_number(spec, options, "max_match", int, max(8, min_match)),
        min_match=min_match,
    )


def _make_suffix(spec: str, options: Mapping[str, str], target: LoadedTarget) -> SuffixDrafter:
    _refuse_unknown(spec, options, _SUFFIX_OPTIONS)
    drafter = SuffixDrafter(
        rule=options.get("rule", "tree"),
        max_depth=_number(spec, options, "max_depth", int, 24),
        width=_number(spec, options, "width", int, 4),
        min_prob=_number(spec, options, "min_prob", float, 0.0) if "min_prob" in options else None,
        factor=_number(spec, options, "factor", float, 1.0),
        offset=_number(spec, options, "offset", float, 0.0),
        max_nodes=_number(spec, options, "max_nodes", int, 200_000),
    )
    if "preload" in options:
        path = Path(options["preload"]).expanduser()
        drafter.preload(read_answers(path, target.tokenizer, vocab_size=target.spec.vocab_size))
    return drafter


def _make_head(
    spec: str,
    folder: Path,
    options: Mapping[str, str],
    target: LoadedTarget,
    *,
    name: str,
    dtype: str,
    tree: TreeShape | None,
) -> EagleDrafter:
    _refuse_unknown(spec, options, _HEAD_OPTIONS)
    native = target if isinstance(target, NativeTarget) else None
    precision = _head_precision(name, options.get("dtype", dtype), target.placement.precision, native is not None)
    loaded = load_head(folder, target)
    return EagleDrafter(
        loaded.head,
        Placement(device=target.spec.device, precision=precision),
        name=name,
        tree=tree,
        min_prob=_number(spec, options, "min_prob", float, 0.0),
        window=_number(spec, options, "window", int, loaded.head.config.max_positions),
        context=None if native is None or precision == "float32" else native.context,
        card_rates=_card_rates(loaded.info.acceptance),
    )


def _card_rates(acceptance: Mapping[str, Any]) -> tuple[float, ...]:
    """Kept of reached at each depth, as measured when the head was trained; depths that few texts reached are left out."""
    reached, kept = acceptance.get("reached"), acceptance.get("kept")
    if not isinstance(reached, list) or not isinstance(kept, list):
        return ()
    pairs = itertools.takewhile(lambda pair: pair[0] >= _FEWEST_REACHED, zip(reached, kept, strict=False))
    return tuple(k / r for r, k in pairs)


def _head_precision(name: str, dtype: str, of_target: Precision, is_native: bool) -> Precision:
    """Beside a native target a head runs natively, unless float32 is asked for; int8 runs nowhere else."""
    default: Precision = "bfloat16"
    if of_target == "float32" or (of_target == "int8" and is_native):
        default = of_target
    precision = _precision(dtype, default)
    allowed = ("float32", "bfloat16", "int8") if is_native else ("float32", "bfloat16")
    if precision in allowed:
        return precision
    why = " beside a target that is not native" if precision == "int8" else ""
    raise ConfigError(
        f"draft dtype {precision} is not possible for the head {name}{why}; allowed: auto, {', '.join(allowed)}"
    )


def _make_merged(
    spec: str, name: str, options: Mapping[str, str], target: LoadedTarget, *, dtype: str, tree: TreeShape | None
) -> MergedDrafter:
    folder = head_path(name) if name else None
    if folder is None:
        known = ", ".join(shipped_heads()) or "none"
        raise ModelNotFound(
            f"drafter {spec!r}: {name or 'nothing'} is not the folder of a head; give merged:HEAD, "
            f"HEAD being a folder that outrider train wrote, or one that came along ({known})"
        )
    shape = _with_options(spec, options, tree or _MERGED_SHAPE)
    head = _make_head(spec, folder, options, target, name=name, dtype=dtype, tree=shape)
    return MergedDrafter(SuffixDrafter(), head, shape=shape, name=f"merged:{name}")


def _tree_shape(spec: str, options: Mapping[str, str], tree: TreeShape | None) -> TreeShape | None:
    """``None`` drafts chains."""
    has_options = any(name in _TREE_OPTIONS for name in options)
    return _with_options(spec, options, tree or TreeShape()) if has_options else tree


def _with_options(spec: str, options: Mapping[str, str], shape: TreeShape) -> TreeShape:
    numbers = {name: _number(spec, options, name, kind, getattr(shape, name)) for name, kind in _TREE_OPTIONS.items()}
    return replace(shape, **numbers)


def _draft_model(name: str, target: LoadedTarget, *, dtype: str, offline: bool) -> LoadedTarget:
    if name == "self":
        return target.requantized(_precision(dtype, "int8"))
    if name == "random":
        return _random_model(target)
    head, _, layers = name.partition(":")
    if head == "slice":
        return _slice(name, layers, target, dtype)
    refuse_foreign_head(name)
    model = _load(name, target, dtype=dtype, offline=offline)
    check_vocabulary(model, target)
    return model


def _slice(name: str, layers: str, target: LoadedTarget, dtype: str) -> LoadedTarget:
    if not layers.isdecimal():
        raise ConfigError(f"drafter {name!r} does not say how many layers; give for example slice:8")
    precision = _precision(dtype, target.placement.precision)
    whole = target if precision == target.placement.precision else target.requantized(precision)
    return whole.slice_layers(int(layers))


def _precision(dtype: str, default: Precision) -> Precision:
    if dtype == "auto":
        return default
    for precision in get_args(Precision):
        if dtype == precision:
            return precision  # type: ignore[no-any-return]
    raise ConfigError(
        f"draft dtype {dtype!r} is unknown; allowed: auto, {', '.join(get_args(Precision))}"
        f"{nearest(dtype, get_args(Precision))}"
    )


def _random_model(target: LoadedTarget) -> LoadedTarget:
    config = LlamaConfig(
        vocab_size=target.spec.vocab_size,
        hidden_size=_RANDOM_WIDTH,
        intermediate_size=2 * _RANDOM_WIDTH,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_width=_RANDOM_WIDTH // 2,
        norm_eps=1e-5,
        max_positions=target.spec.max_positions,
        tie_word_embeddings=True,
        eos_token_ids=target.spec.eos_token_ids,
    )
    return LlamaTarget.random(config, Placement(device=target.spec.device, precision="float32"), seed=0)


def _load(name: str, target: LoadedTarget, *, dtype: str, offline: bool) -> LoadedTarget:
    precision = _precision(dtype, target.placement.precision)
    try:
        return load_target(name, dtype=precision, device=str(target.spec.device), offline=offline)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"drafter {name!r} is none of {', '.join(DRAFTERS)}{nearest(name, DRAFTERS)}, and as a model: {error}"
        ) from None
