"""Rounds: every item through every arm, one arm at a time, in an order that is shuffled anew for each item."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import Arm
from benchmarks.peers.installs import NotAvailable
from benchmarks.peers.process import Driver, DriverError
from benchmarks.peers.setups import Ready, Setups
from benchmarks.peers.workfile import WorkFile
from benchmarks.stats import alternate

__all__ = ["Item", "Plan", "make_items", "measure"]

WARM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What one turn decodes: one prompt, or with several streams a few prompts at once.

    Attributes:
        name: of the prompt, or of the first and number of them.
        task: kind of prompt, ``mixed`` for several.
        prompts: token ids.
    """

    name: str
    task: str
    prompts: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        items: in order; warm: a prompt of the same sort that is not one of them.
        tokens: new tokens a prompt; streams: prompts at a time; rounds: times that all is run, with drivers started anew.
        threads: of each arm; context: tokens that fit the longest prompt and its answer.
    """

    items: Sequence[Item]
    warm: list[int]
    tokens: int
    streams: int
    rounds: int
    threads: int
    stop_ids: tuple[int, ...]
    start_s: float = 900.0
    request_s: float = 600.0

    @property
    def context(self) -> int:
        """Longest prompt and answer, and room for drafts past the end, rounded up."""
        longest = max(len(prompt) for item in self.items for prompt in item.prompts)
        return -(-(longest + self.tokens + 72) // 256) * 256


def make_items(prompts: Sequence[tuple[str, str, list[int]]], streams: int) -> list[Item]:
    """One item a prompt; with several streams, two prompts for each stream, drawn from the tasks in turn.

    Args:
        prompts: name, task and token ids.
        streams: requests at a time.
    """
    if streams == 1:
        return [Item(name=name, task=task, prompts=[ids]) for name, task, ids in prompts]
    size = 2 * streams
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [
        Item(name=f"{group[0][0]} and {len(group) - 1} more", task="mixed", prompts=[ids for _, _, ids in group])
        for group in groups
    ]


def measure(arms: Sequence[Arm], setups: Setups, plan: Plan, work: WorkFile, *, logs: Path) -> None:
    """All rounds. A driver lives for one round, so that no arm that remembers meets a prompt again."""
    ready = _prepare(arms, setups, work)
    for round_ in range(plan.rounds):
        if all(work.has(round_, item.name, name) for item in plan.items for name in ready):
            continue
        drivers = _start(ready, plan, work, logs)
        probe = Driver(
            setups.probe(), _start_object(plan), log=logs / "probe.log", start_s=plan.start_s, request_s=plan.request_s
        )
        try:
            _round(round_, drivers, probe, plan, work)
        finally:
            for driver in (*drivers.values(), probe):
                driver.close()


def _prepare(arms: Sequence[Arm], setups: Setups, work: WorkFile) -> dict[str, Ready]:
    """Install and build; an arm that cannot be had is recorded with the reason."""
    found = {}
    for arm in arms:
        _say(f"{arm.name}: preparing")
        try:
            found[arm.name] = setups.prepare(arm)
        except NotAvailable as error:
            _say(f"{arm.name}: not available: {error}")
            work.add(kind="arm", arm=arm.name, unavailable=str(error))
    return found


def _start(ready: dict[str, Ready], plan: Plan, work: WorkFile, logs: Path) -> dict[str, Driver]:
    drivers = {}
    for name, each in ready.items():
        begun = time.perf_counter()
        try:
            driver = Driver(
                each,
                _start_object(plan),
                log=logs / f"{name}.log",
                start_s=plan.start_s,
                request_s=plan.request_s,
            )
            driver.ask(_request([plan.warm] * plan.streams, WARM_TOKENS, plan))
        except (NotAvailable, DriverError) as error:
            _say(f"{name}: not available: {error}")
            work.add(kind="arm", arm=name, unavailable=str(error))
            continue
        started_s = time.perf_counter() - begun
        _say(f"{name}: up in {started_s:.1f} s")
        about = {key: value for key, value in driver.about.items() if key != "ready"}
        work.add(kind="arm", arm=name, start_s=round(started_s, 2), version=each.version, **about)
        drivers[name] = driver
    return drivers


def _start_object(plan: Plan) -> dict[str, Any]:
    return {"threads": plan.threads, "streams": plan.streams, "context": plan.context}


def _round(round_: int, drivers: dict[str, Driver], probe: Driver, plan: Plan, work: WorkFile) -> None:
    for index, item in enumerate(plan.items):
        order = list(alternate(list(drivers), round_ * len(plan.items) + index))
        left = [name for name in order if not work.has(round_, item.name, name) and name not in work.stopped]
        if not left:
            continue
        _say(f"round {round_ + 1} of {plan.rounds}, item {index + 1} of {len(plan.items)}: {item.name}")
        work.add(kind="probe", round=round_, item=item.name, reply=probe.ask({}))
        for name in left:
            _turn(name, drivers[name].ask, _request(item.prompts, plan.tokens, plan), round_, item, work)


def _turn(
    name: str,
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    request: dict[str, Any],
    round_: int,
    item: Item,
    work: WorkFile,
) -> None:
    """One turn of one arm; an arm that fails is left out from here on, and the record says why."""
    try:
        reply = ask(request)
    except DriverError as error:
        _say(f"{name}: stopped: {error}")
        work.add(kind="stopped", arm=name, reason=f"{item.name}: {error}")
        return
    work.add(kind="turn", round=round_, item=item.name, arm=name, reply=reply)


def _request(prompts: list[list[int]], tokens: int, plan: Plan) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": tokens, "stop_ids": list(plan.stop_ids)}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
