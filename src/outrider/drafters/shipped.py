"""Heads that come with the package, known by their names: in a clone under ``heads/``, in a wheel inside the package.

A head's card may say which way of drafting with it was fastest when it was measured: that is what ``auto`` means.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.drafters.head_folder import HeadTarget, is_head_folder, read_info

__all__ = ["FASTEST", "HEAD_FOLDERS", "best_draft", "head_for", "head_path", "shipped_heads"]

_PACKAGE = Path(__file__).parents[1]
HEAD_FOLDERS = (_PACKAGE / "heads", _PACKAGE.parents[1] / "heads")
"""Where heads lie: a wheel puts them into the package; a clone keeps them beside ``src``."""
FASTEST = "fastest"
"""Key of a card's acceptance: the drafter that won in each precision, ``{}`` standing for the head:
``{"bfloat16": "merged:{}:num_nodes=9"}``."""
_WITHOUT_HEAD = "suffix"


def shipped_heads() -> dict[str, Path]:
    """Name and folder of each head that came along, in order of the names."""
    found = {path.name: path for folder in reversed(HEAD_FOLDERS) if folder.is_dir() for path in folder.iterdir()}
    return {name: path for name, path in sorted(found.items()) if is_head_folder(path)}


def head_path(name: str) -> Path | None:
    """The folder of a head, given as a path or by the name of one that came along; ``None`` if it is neither."""
    if is_head_folder(name):
        return Path(name).expanduser()
    return shipped_heads().get(name) if "/" not in name else None


def head_for(target: HeadTarget) -> str | None:
    """Name of the head that came along for this very target; ``None`` if there is none."""
    heads = shipped_heads().items()
    return next((name for name, path in heads if read_info(path).target_fingerprint == target.spec.fingerprint), None)


def best_draft(target: HeadTarget) -> str:
    """What ``auto`` stands for: the winner in the target's precision on the card of a head that came along for this very
    target, or ``suffix``. The winners were measured beside native passes, so they count there only."""
    name = head_for(target) if target.spec.path.startswith("native") else None
    if name is None:
        return _WITHOUT_HEAD
    winners = read_info(shipped_heads()[name]).acceptance.get(FASTEST)
    winner = winners.get(target.spec.precision) if isinstance(winners, Mapping) else None
    return str(winner or _WITHOUT_HEAD).replace("{}", name)
