"""Faults in the server: who may pass, what is a call, what is counted, what is told."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["SERVING"]

SERVING = (
    Mutant(
        name="any_key_opens_the_server",
        file="serve/auth.py",
        old="if hmac.compare_digest(digest, key.digest):",
        new="if digest or hmac.compare_digest(digest, key.digest):",
        tests=("tests/serve/test_auth.py::test_names_and_bare_keys",),
        why="whoever guesses anything may use the server",
    ),
    Mutant(
        name="calls_without_required_arguments_are_calls",
        file="serve/tools.py",
        old="isinstance(values, dict) and bool(values or not self._required[name])",
        new="isinstance(values, dict)",
        tests=("tests/serve/test_tools.py::test_what_is_no_call_stays_text",),
        why="an agent would run a tool with no arguments that needs some",
    ),
    Mutant(
        name="half_a_tag_is_handed_out_as_text",
        file="serve/tools.py",
        old="held_back = 0 if self._is_over else _overlap(self._text, OPEN)",
        new="held_back = 0",
        tests=("tests/serve/test_tools.py::test_cutting_changes_nothing",),
        why="a streamed answer shows the beginning of a call as text, and the call is lost",
    ),
    Mutant(
        name="an_unknown_field_passes_in_silence",
        file="serve/protocol.py",
        old="        elif name not in known:\n",
        new="        elif not name:\n",
        tests=("tests/serve/test_protocol.py::test_mistakes_are_named",),
        why="a field that is ignored is a promise broken (law 2)",
    ),
    Mutant(
        name="a_request_of_many_prompts_is_queued_in_part",
        file="serve/worker.py",
        old="            for job in done:\n                self.bridge.cancel(job.id)\n",
        new="",
        tests=("tests/serve/test_worker.py::test_all_jobs_of_a_request_or_none",),
        why="prompts of a refused request would be decoded for nobody",
    ),
    Mutant(
        name="the_pieces_of_held_back_text_are_dropped",
        file="serve/replies.py",
        old="                self._held.insert(0, (kind, text[num_characters:]))\n",
        new="",
        tests=("tests/serve/test_replies.py::test_pieces_join_to_the_text",),
        why="coloured text would lack letters behind a stop string that did not come",
    ),
)
