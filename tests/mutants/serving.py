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
    Mutant(
        name="references_in_tools_are_read_from_the_wrong_place",
        file="serve/tool_grammar.py",
        old='value["$ref"] = place + value["$ref"][1:]',
        new='value["$ref"] = value["$ref"] + ""',
        tests=("tests/serve/test_tool_grammar.py::test_references_within_a_schema_hold_wherever_it_stands",),
        why="a tool whose schema names its parts, as pydantic writes them, cannot be forced",
    ),
    Mutant(
        name="arguments_that_no_schema_declares_may_come",
        file="serve/tool_grammar.py",
        old='value["additionalProperties"] = False',
        new='value["additionalProperties"] = True',
        tests=("tests/serve/test_tool_grammar.py::test_what_an_answer_may_be",),
        why="the function behind a tool is called with arguments that it does not have",
    ),
    Mutant(
        name="an_only_argument_comes_in_one_piece",
        file="serve/tools.py",
        old="if self._walked - self._arguments_at != LONG or",
        new="if True or",
        tests=("tests/serve/test_tools.py::test_a_long_text_streams_before_it_is_complete",),
        why="a file that a call writes arrives when it is complete, not while it is written",
    ),
)
