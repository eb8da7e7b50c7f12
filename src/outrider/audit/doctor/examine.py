"""Why is acceptance low? Every cause has a small check; where a cause can be undone, its undoing is measured.

A head can be wrong in ways that nothing reports: it loads, it drafts, and little is kept. Each check reads what lies there
(config, tensors, what was recorded at training) and, where another wiring, precision, temperature or rendering is possible,
runs it on the same requests. A cause counts as proved when the mended variant is better beyond noise, paired over requests.
"""

from __future__ import annotations

from pathlib import Path

from outrider.audit.doctor.case import Case
from outrider.audit.doctor.head import examine_head
from outrider.audit.doctor.other import examine_other
from outrider.audit.doctor.report import DoctorReport
from outrider.drafters.build import parse_spec
from outrider.drafters.head_folder import is_head_folder
from outrider.errors import ConfigError

__all__ = ["examine"]


def examine(case: Case) -> DoctorReport:
    """Examine a drafter.

    Args:
        case: drafter, target, requests and settings.

    Raises:
        ConfigError: nothing to examine, or an option that is not possible.
        ModelError: a drafter that is not there, or files that cannot be read at all.
        DataError: requests whose answers leave nothing to draft.
    """
    if not case.prompts:
        raise ConfigError("no requests were given; the doctor measures on requests")
    if case.num_draft_tokens < 1:
        raise ConfigError(f"num_draft_tokens {case.num_draft_tokens} is not possible; allowed: 1 or more")
    name, options = parse_spec(case.draft)
    if name == "none":
        raise ConfigError("drafter 'none' has nothing to examine; give a drafter")
    folder = name.removeprefix("merged:")
    if not is_head_folder(folder):
        return examine_other(case)
    window = options.get("window", "")
    return examine_head(case, Path(folder).expanduser(), int(window) if window.isdecimal() else None)
