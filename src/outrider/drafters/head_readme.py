"""The README that lies beside a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.drafters.eagle_config import EagleConfig

__all__ = ["readme"]


def readme(name: str, shape: EagleConfig, config: Mapping[str, Any], num_bytes: int) -> str:
    """Markdown for a head's folder.

    Args:
        name: of the folder.
        shape: the head's.
        config: what ``config.json`` holds.
        num_bytes: of all tensors.
    """
    taps = ", ".join(map(str, shape.tap_layers))
    parts = [
        f"# {name}",
        f"An EAGLE-3 head for speculative decoding of `{config['target_name']}` "
        f"(fingerprint `{config['target_fingerprint']}`), {num_bytes / 1e6:.1f} MB.",
        "It proposes tokens; the target decides. It can make decoding faster or slower, it cannot change the output.",
        f"```bash\noutrider generate --target {config['target_name']} --draft PATH/TO/{name}\n```",
        f"* reads the target's hidden states before layers {taps} (the number of layers is the last one's output)\n"
        f"* predicts {shape.draft_vocab_size} of the target's {shape.target_vocab_size} tokens\n"
        f"* {shape.num_layers} layer(s) of width {shape.hidden_size}, trained on texts of up to "
        f"{shape.max_positions} tokens",
    ]
    sections = (("Acceptance", "acceptance"), ("Trained on", "data"), ("Recipe", "training"))
    parts += [f"## {title}\n\n{_lines(config[key])}" for title, key in sections if config.get(key)]
    return "\n\n".join(parts) + "\n"


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"* {key}: {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value)
