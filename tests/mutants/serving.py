"""Faults in the server: who may pass, and what is a call."""

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
        tests=("tests/serve/test_tools.py::test_a_tag_in_two_pieces",),
        why="a streamed answer shows the beginning of a call as text, and the call is lost",
    ),
    Mutant(
        name="a_server_that_ends_still_takes_requests",
        file="serve/worker.py",
        old="if self._is_closed:",
        new="if self._is_closed and False:",
        tests=("tests/serve/test_worker.py::test_a_closed_door_is_told_until_the_last_answer_is_out",),
        why="it accepts what it will not finish, or never ends",
    ),
    Mutant(
        name="of_two_values_for_one_name_one_is_ignored",
        file="serve/protocol.py",
        old="if len(values) < len(pairs):",
        new="if False:",
        tests=("tests/serve/test_protocol.py::test_one_name_twice_in_an_object_is_refused",),
        why="a field that was sent is not honoured, and nobody is told",
    ),
)
