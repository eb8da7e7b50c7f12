"""Writes what was measured with a head onto its card: acceptance over whole Spec-Bench, and which drafter with it is fastest.

``--speed`` is a result of ``engine_speed --only drafts``: its fastest arm in each precision (with this head, or ``suffix``, if
that wins) is what ``--draft auto`` stands for there from then on. ``--acceptance`` is a result of ``benchmarks.acceptance``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.drafters.head_folder import read_head, save_card
from outrider.drafters.shipped import FASTEST
from outrider.errors import OutriderError

__all__ = ["fastest_draft", "main", "measured_acceptance"]


def fastest_draft(result: Mapping[str, Any], head: str) -> dict[str, str]:
    """By precision the arm with the least time, ``{}`` standing for the head; its budget of draft tokens is left out.

    Args:
        result: of ``engine_speed``, with the section ``drafts``. head: how the arms name it.
    """
    fastest = {}
    for precision, arms in result["sections"]["drafts"]["summary"].items():
        speed = {name: arm["all"]["speed_up"]["value"] for name, arm in arms.items() if name != "none"}
        fastest[precision] = max(speed, key=lambda name: speed[name]).rpartition("@")[0].replace(head, "{}")
    return fastest


def measured_acceptance(result: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Accepted length and tokens a pass of each drafter over all prompts of a result of ``benchmarks.acceptance``."""
    return {
        each["drafter"].replace(head, "HEAD"): {
            "tokens_per_pass": round(each["categories"]["all"]["tokens_per_pass"], 3),
            "accepted_length": round(each["categories"]["all"]["accepted_length"], 3),
            "prompts": sum(each["prompts"].values()),
        }
        for each in result["measurements"]
        if head in each["drafter"]
    }


def main(argv: list[str] | None = None) -> int:
    """Rewrite the card."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_card", description=__doc__)
    parser.add_argument("head", type=Path, metavar="HEAD", help="folder; its name is how the results name it")
    parser.add_argument("--speed", type=Path, help="result of engine_speed with the section drafts")
    parser.add_argument("--acceptance", type=Path, nargs="+", default=[], help="results of benchmarks.acceptance")
    args = parser.parse_args(argv)
    try:
        loaded = read_head(args.head)
        found: dict[str, Any] = {}
        if args.speed:
            found[FASTEST] = fastest_draft(json.loads(args.speed.read_text(encoding="utf-8")), args.head.name)
        for path in args.acceptance:
            measured = measured_acceptance(json.loads(path.read_text(encoding="utf-8")), args.head.name)
            found["spec_bench"] = {**found.get("spec_bench", {}), **measured}
    except (OutriderError, OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    info = replace(loaded.info, acceptance={**loaded.info.acceptance, **found})
    save_card(args.head, loaded.head.config, info)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
