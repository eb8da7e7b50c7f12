"""A few prompts that come with the package, so that the demonstration and the audits need no files.

Copying (edit this code, extract, repeat) is where drafters that need no training shine; prose is where they do not.
Both are here, since a demonstration that shows only the first kind would be no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUNDLED", "BundledPrompt", "bundled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledPrompt:
    """One user message; ``kind`` is ``copy`` or ``prose``."""

    name: str
    kind: str
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat that asks it."""
        return [{"role": "user", "content": self.text}]


_CODE = '''def total_price(items, tax_rate):
    """Sum of all prices with tax."""
    total = 0.0
    for item in items:
        if item.quantity <= 0:
            raise ValueError(f"quantity of {item.name} must be positive")
        total += item.price * item.quantity
    return round(total * (1 + tax_rate), 2)


def receipt_lines(items, tax_rate):
    """One line for each item, then the total."""
    lines = []
    for item in items:
        lines.append(f"{item.name:20} {item.quantity:4d} x {item.price:8.2f}")
    lines.append(f"total {total_price(items, tax_rate):32.2f}")
    return lines
'''

_LOG = """2031-03-02 08:14:07 INFO  gateway: listening on port 8080
2031-03-02 08:14:09 ERROR storage: volume backup-07 is read-only, refusing writes
2031-03-02 08:14:11 INFO  gateway: request 5512 served in 41 ms
2031-03-02 08:14:15 WARN  cache: 3 entries dropped, memory limit of 512 MB reached
2031-03-02 08:14:21 ERROR payments: provider answered 503, retry in 30 seconds
2031-03-02 08:14:22 INFO  gateway: request 5513 served in 38 ms
2031-03-02 08:14:30 ERROR storage: volume backup-07 is read-only, refusing writes
2031-03-02 08:14:52 INFO  payments: provider answers again, 4 payments sent"""

_MEMO = """The workshop begins on Tuesday at nine o'clock in room 204. Please bring your badge, since the doors on the second
floor open only with it. Lunch is served at half past twelve in the courtyard; people who need a special diet should write
to the kitchen before Monday noon. In the afternoon there are two parallel sessions: measuring instruments in room 204, and
archives in the reading room. Both end at five o'clock."""

BUNDLED: tuple[BundledPrompt, ...] = (
    BundledPrompt(
        name="edit-code",
        kind="copy",
        text="Rename the parameter `tax_rate` to `tax` everywhere in this code. Answer with the whole code and nothing "
        f"else.\n\n```python\n{_CODE}```",
    ),
    BundledPrompt(
        name="extract",
        kind="copy",
        text=f"Copy every line with the word ERROR from this log, exactly as it stands.\n\n{_LOG}",
    ),
    BundledPrompt(
        name="repeat",
        kind="copy",
        text=f"Repeat this note word for word.\n\n{_MEMO}",
    ),
    BundledPrompt(
        name="story",
        kind="prose",
        text="Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    ),
    BundledPrompt(
        name="explain",
        kind="prose",
        text="Explain to a child why the sea is salty and rivers are not.",
    ),
)


def bundled(*, num_prompts: int | None = None) -> tuple[BundledPrompt, ...]:
    """The first prompts, kinds taking turns, so that a short run sees both."""
    copies = [prompt for prompt in BUNDLED if prompt.kind == "copy"]
    prose = [prompt for prompt in BUNDLED if prompt.kind == "prose"]
    mixed: list[BundledPrompt] = []
    for index in range(max(len(copies), len(prose))):
        mixed += copies[index : index + 1] + prose[index : index + 1]
    return tuple(mixed[:num_prompts])
