"""Faults in grammars and in what drafters do under them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["GRAMMARS"]

EXACT = "tests/sampling/test_grammar_law.py"
MATCHER = "tests/sampling/test_matcher.py"
COMPILER = "tests/sampling/test_grammar.py"
FORCED = "tests/drafters/test_forced.py"
ENGINE = "tests/engine/test_grammar.py"

GRAMMARS = (
    Mutant(
        name="forbidden_draft_is_dropped_after_it_was_drawn",
        file="drafters/forced.py",
        old="            self._take_drawn(proposal)\n",
        new="            allowed = [self.grammar.allows(proposal.tokens[:n], t) for n, t in enumerate(proposal.tokens)]\n"
        "            self._take_drawn(proposal.truncate([*allowed, False].index(False)))\n",
        tests=(f"{EXACT}::test_rejection_of_drawn_chains_keeps_the_law",),
        why="whether a draft is verified would depend on what was drawn",
    ),
    Mutant(
        name="mask_of_the_parent_node",
        file="sampling/masks.py",
        old="places = [(matcher, tuple(path)) for matcher, path in zip(matchers, paths, strict=True)",
        new="places = [(matcher, tuple(path[:-1])) for matcher, path in zip(matchers, paths, strict=True)",
        tests=(f"{EXACT}::test_trees_and_forced_tokens_keep_the_law",),
        why="what may follow a node is not what may stand in its place",
    ),
    Mutant(
        name="mask_of_a_sibling",
        file="sampling/matcher.py",
        old="            if walked != token:\n",
        new="            if walked < 0:\n",
        tests=(f"{MATCHER}::test_every_place_of_a_tree_answers_as_if_nothing_else_had_been_read",),
        why="a node is reached from its own parent, not from whatever was read last at that depth",
    ),
    Mutant(
        name="drafts_are_never_taken_back",
        file="sampling/matcher.py",
        old="            self._matcher.rollback(surplus)\n",
        new="",
        tests=(f"{MATCHER}::test_every_place_of_a_tree_answers_as_if_nothing_else_had_been_read",),
        why="a refused draft would have been said, as far as the grammar knows",
    ),
    Mutant(
        name="mask_of_another_request",
        file="sampling/masks.py",
        old="    masks_BW = grammar_masks(places)\n",
        new="    masks_BW = grammar_masks(places[::-1])\n",
        tests=(f"{MATCHER}::test_only_rows_with_a_grammar_change",),
        why="each request is held to its own grammar",
    ),
    Mutant(
        name="grammar_of_an_earlier_request",
        file="sampling/grammar.py",
        old="key = (constraint.kind, constraint.text, whitespace)",
        new='key = (constraint.kind, "", whitespace)',
        tests=(f"{COMPILER}::test_a_constraint_is_compiled_once",),
        why="two regular expressions are two grammars",
    ),
    Mutant(
        name="argmax_is_not_asked_about",
        file="sampling/laws.py",
        old="                forbidden.append(index)\n",
        new="                pass\n",
        tests=(f"{ENGINE}::test_what_a_greedy_model_would_rather_say_is_not_said",),
        why="greedy decoding takes the likeliest token that is allowed",
    ),
    Mutant(
        name="forced_token_is_taken_without_its_mask",
        file="sampling/matcher.py",
        old="            return token == forced[0]\n",
        new="            pass\n",
        tests=(f"{MATCHER}::test_a_token_is_allowed_exactly_where_its_bit_is_set",),
        why="where text is forced the mask allows its canonical token only; other spellings of it are forbidden",
    ),
    Mutant(
        name="forced_tokens_outlive_a_commit",
        file="sampling/matcher.py",
        old="{place[size:]: run for place, run in self._forced.items() if place[:size] == path}",
        new="dict(self._forced)",
        tests=(f"{MATCHER}::test_committing_moves_the_root",),
        why="places are counted from the last committed token",
    ),
    Mutant(
        name="finished_grammar_goes_on",
        file="sampling/matcher.py",
        old="        return End(len(tokens), is_broken=False)\n",
        new="        return None\n",
        tests=(f"{ENGINE}::test_the_end_of_a_grammar_is_a_stop_even_at_the_limit",),
        why="an output that is complete has stopped",
    ),
    Mutant(
        name="candidates_are_not_cut",
        file="drafters/forced.py",
        old="            if child is None and self.grammar.allows(self._path(above), token):\n",
        new="            if child is None:\n",
        tests=(f"{FORCED}::test_deterministic_candidates_are_cut_at_the_first_forbidden_token",),
        why="a row of the pass for a token that cannot be kept; counted as a draft, it would darken the acceptance rate",
    ),
)
