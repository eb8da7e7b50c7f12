"""Tables about heads: how fast they are trained, what the recipe's choices bring, temperature, a changed target, another
engine, scenarios."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import markdown, provenance_line

__all__ = [
    "table_of_ablations",
    "table_of_changed_target",
    "table_of_head_scenarios",
    "table_of_interop",
    "table_of_temperatures",
    "table_of_train_speed",
    "train_speed_rows",
]

OFF_POLICY_BASE = "off-policy 0"
BASES = ("base", OFF_POLICY_BASE)


def table_of_ablations(result: dict[str, Any]) -> str:
    """One variant a row, by what its drafts are worth along the held-out texts; differences to its base."""
    rows = [
        ("variant", "tokens a pass along the texts", "to base", "tokens a pass decoded", "kept by depth", "updates")
    ]
    found = {each["variant"]: _along(each) for each in result["results"]}
    for each in sorted(result["results"], key=_along, reverse=True):
        base = found.get(_base_of(each["variant"]))
        difference = "" if base is None or each["variant"] in BASES else f"{_along(each) - base:+.3f}"
        kept = " ".join(f"{share:.2f}" for share in each["kept_at_depth"])
        numbers = (f"{_along(each):.3f}", difference, f"{each['best']:.3f}", kept, str(each["updates"]))
        rows.append((each["variant"], *numbers))
    note = f"\n{result['positions']:,} loss-masked positions each. A long run:\n\n"
    long_run = [("positions of the long run", *(f"{each['positions']:,}" for each in result["long_run"]))]
    long_run.append(("along the texts", *(f"{_along(each):.2f}" for each in result["long_run"])))
    long_run.append(("decoded", *(f"{each['tokens_per_pass']:.2f}" for each in result["long_run"])))
    return markdown(rows) + note + markdown(long_run) + provenance_line(result)


def _base_of(variant: str) -> str:
    """What a variant is compared with; off-policy ones use the rows that have a reference, and so have one of their own."""
    return OFF_POLICY_BASE if variant.startswith("off-policy ") else "base"


def _along(evaluation: dict[str, Any]) -> float:
    """Tokens a pass if every token of the held-out texts began a step."""
    return 1 + float(sum(evaluation["agreement_along_texts"]))


def table_of_interop(result: dict[str, Any]) -> str:
    """Accepted length and the rate at each position in both engines, by way of counting; then the largest differences."""
    size = len(result["counts"]["whole steps"]["vllm"]["rates"])
    rows = [("counted over", "engine", "steps", "accepted length", *(f"draft {i + 1}" for i in range(size)))]
    for name, engines in result["counts"].items():
        for engine, counts in engines.items():
            rates = [f"{rate:.3f}" for rate in counts["rates"]]
            rows.append((name, engine, str(counts["steps"]), f"{counts['accepted_length']:.3f}", *rates))
    gaps = ", ".join(f"{name} {gap:.3f}" for name, gap in result["gaps"].items())
    verdict = "met" if result["agrees"] else "missed"
    note = (
        f"\nLargest differences: {gaps} (bar over whole steps: {result['tolerance']}, {verdict}). "
        f"{result['identical_outputs']} of {result['prompts']} outputs identical, {result['shared_tokens']} tokens in common "
        "before answers part.\n"
    )
    return markdown(rows) + note + provenance_line(result)


def table_of_temperatures(result: dict[str, Any]) -> str:
    """Accepted length of each drafter by task at each temperature, then over all with the rates by position."""
    measurements = result["measurements"]
    categories = list(measurements[0]["categories"])
    rows = [("drafter", "temperature", *categories, "kept of reached, by position")]
    for each in measurements:
        found = [each["categories"][name] for name in categories]
        positions = [one for one in found[-1]["per_position"][:4] if one["reached"]]
        rates = " ".join(f"{one['accepted'] / one['reached']:.2f}" for one in positions)
        lengths = (f"{one['accepted_length']:.2f} ({one['tokens_per_pass']:.2f})" for one in found)
        rows.append((f"{each['drafter']}@{each['num_draft_tokens']}", f"{each['temperature']:g}", *lengths, rates))
    counts = ", ".join(f"{name} {count}" for name, count in measurements[0]["prompts"].items())
    note = f"\nAccepted length (tokens a pass in brackets) by task; prompts: {counts}.\n"
    return markdown(rows) + note + provenance_line(result)


def table_of_changed_target(result: dict[str, Any]) -> str:
    """What the doctor says of head and target, and whether outputs stay those of the target."""
    rows = [
        (
            "noise on the target",
            "head's folder",
            "tokens a pass",
            "cause `checkpoint`",
            "evidence",
            "outputs equal to plain",
        )
    ]
    for each in result["results"]:
        equal = ", ".join(
            f"{arm['sampling']}: {arm['num_identical']} of {arm['num_outputs']}" for arm in each["identity"]["arms"]
        )
        for name, told in each["doctor"].items():
            found = next(finding for finding in told["findings"] if finding["cause"] == "checkpoint")
            served = f"{told['acceptance']['served']:.2f}"
            rows.append((f"{each['share']:.0%}", name, served, found["status"], found["evidence"], equal))
    return markdown(rows) + "\n" + provenance_line(result)


def table_of_head_scenarios(result: dict[str, Any]) -> str:
    """One check a row."""
    rows = [("check", "verdict", "seen")]
    rows += [(each["check"], each["verdict"], each["seen"].replace("|", "\\|")) for each in result["results"]]
    return markdown(rows) + "\n" + provenance_line(result)


def table_of_train_speed(result: dict[str, Any]) -> str:
    """Updates with native kernels and without, their share of the matrix rate, and the bar."""
    settings = result["settings"]
    kernels = f"; native kernels: {settings['kernels']}" if settings["kernels"] else ""
    note = (
        f"\nMedian (quartiles) of {settings['turns']} turns of {settings['updates']} updates, over "
        f"{settings['corpus']['texts']} texts{kernels}. The share is that of each turn in the two probes next to it.\n"
    )
    return markdown(train_speed_rows(result)) + note + provenance_line(result)


def train_speed_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row an arm of every cell; the first row names the columns."""
    rows: list[tuple[str, ...]] = [
        (
            "positions an update, draft entries",
            "threads",
            "form",
            "share of the matrix rate",
            "GFLOP/s",
            "probes, GFLOP/s",
            "loss-masked positions/s",
            "to PyTorch",
            "bar",
        )
    ]
    for index, cell in enumerate(result["cells"]):
        about = (f"{cell['batch_positions']:,}, {cell['draft_vocab']:,}", str(cell["threads"]))
        for arm, found in cell["arms"].items():
            numbers = (
                _quartiles(found["share_of_matrix_rate"], ".2f"),
                _quartiles(found["model_gflop_per_s"], ".0f"),
                _quartiles(cell["probe_gflop_per_s"], ".0f"),
                _quartiles(found["masked_positions_per_s"], ",.0f"),
            )
            ratio = f"{cell['speed_up']['value']:.2f}x" if arm == "native" and "speed_up" in cell else ""
            form = {"native": "native", "pytorch": "PyTorch"}[arm]
            rows.append((*about, form, *numbers, ratio, _bar(result["bars"][index]) if arm == "native" else ""))
    return rows


def _quartiles(found: dict[str, float], form: str) -> str:
    median, low, high = (format(found[name], form) for name in ("median", "lower_quartile", "upper_quartile"))
    return f"{median} ({low} to {high})"


def _bar(bar: dict[str, Any]) -> str:
    return f"≥ {bar['limit']:g}: {bar['verdict']}"
