"""Faults in caches, models, stop rules, counts and drafters."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["CACHES", "COUNTS", "DRAFTERS", "MODELS", "STOPS"]

DENSE = "tests/cache/test_dense.py"
LLAMA = "tests/models/test_llama.py"
IDENTITY = "tests/engine/test_identity.py"
SAME_OUTPUT = f"{IDENTITY}::test_output_is_plain_output"
STOP = "tests/engine/test_stop.py"
REPORT = "tests/engine/test_report.py"
PREFIXES = "tests/engine/test_prefixes.py"
LM = "tests/drafters/test_lm.py"
EAGLE = "tests/drafters/test_eagle.py"
NATIVE_EAGLE = "tests/drafters/test_eagle_native.py"
TAPS = "tests/engine/test_taps.py"

CACHES = (
    Mutant(
        name="keep_forgets_to_move_the_path",
        file="cache/dense.py",
        old="stay = next((index for index, row in enumerate(path) if index != row), len(path))",
        new="stay = len(path)",
        tests=(
            f"{DENSE}::test_keep_moves_the_rows_of_a_tree_path",
            f"{LLAMA}::test_a_kept_tree_path_continues_like_its_chain",
        ),
        why="the first rows of a tree are not its kept path",
    ),
    Mutant(
        name="keep_leaves_one_token_too_many",
        file="cache/dense.py",
        old="self._lengths[slot] = base + len(path)",
        new="self._lengths[slot] = base + len(path) + 1",
        tests=(f"{DENSE}::test_the_worked_example_of_keep", f"{DENSE}::test_an_empty_path_truncates"),
        why="a refused draft would be attended to ever after",
    ),
    Mutant(
        name="copied_prefix_lacks_its_last_token",
        file="cache/dense.py",
        old="to_bucket.slab[to_row, ..., :num_tokens, :] = from_bucket.slab[from_row, ..., :num_tokens, :]",
        new="to_bucket.slab[to_row, ..., : num_tokens - 1, :] = from_bucket.slab[from_row, ..., : num_tokens - 1, :]",
        tests=(f"{DENSE}::test_a_copied_prefix_is_the_source_and_its_own",),
        why="a position of zeros, or of another sequence's past, takes part in attention",
    ),
    Mutant(
        name="freeing_does_not_move_the_last_row",
        file="cache/dense.py",
        old="            self.slab[row].copy_(self.slab[last])\n",
        new="",
        tests=(f"{DENSE}::test_growing_and_freeing_leave_the_others_alone",),
        why="the sequence that is moved into the gap would read the freed one's keys and values",
    ),
    Mutant(
        name="step_keeps_as_many_rows_instead_of_the_path",
        file="engine/step.py",
        old="path=(0, *(node + 1 for node in verdict.path[: len(tokens)]))",
        new="path=tuple(range(1 + len(verdict.path[: len(tokens)])))",
        tests=(f"{SAME_OUTPUT}[4-trees-greedy]", f"{SAME_OUTPUT}[8-trees-seeded]"),
        why="right for chains; of a tree the wrong branch stays",
    ),
    Mutant(
        name="step_drops_the_row_of_the_last_token",
        file="engine/step.py",
        old="path=(0, *(node + 1 for node in verdict.path[: len(tokens)]))",
        new="path=tuple(node + 1 for node in verdict.path[: len(tokens)])",
        tests=(f"{IDENTITY}::test_plain_output_is_a_walk_through_the_table",),
        why="row 0 is the root, a committed token like any other",
    ),
    Mutant(
        name="prefix_is_one_token_too_long",
        file="engine/prefixes.py",
        old="            return index\n",
        new="            return index + 1\n",
        tests=(PREFIXES,),
        why="the first token that differs is not shared",
    ),
)

MODELS = (
    Mutant(
        name="siblings_see_each_other",
        file="cache/attention.py",
        old="seen[row] |= seen[parent]",
        new="seen[row, : row + 1] = True",
        tests=(f"{LLAMA}::test_rows_of_a_tree_equal_their_chains",),
        why="a node's past is its ancestors, not whatever was packed before it",
    ),
    Mutant(
        name="companions_cache_is_read_past_its_end",
        file="cache/attention.py",
        old="visible = torch.arange(num_keys).view(1, 1, -1) <= starts + steps",
        new="visible = torch.arange(num_keys).view(1, 1, -1) <= starts.amax() + steps",
        tests=(f"{LLAMA}::test_ragged_batch_equals_each_sequence_alone",),
        why="shorter sequences would attend to positions that they do not have",
    ),
    Mutant(
        name="tree_positions_by_row",
        file="models/base.py",
        old="depths[row] = 0 if parent < 0 else depths[parent] + 1",
        new="depths[row] = row",
        tests=(f"{LLAMA}::test_rows_of_a_tree_equal_their_chains",),
        why="siblings stand at one position",
    ),
    Mutant(
        name="int8_scale_of_the_whole_tensor",
        file="models/linear_int8.py",
        old="x_RD.abs().amax(dim=-1, keepdim=True).float()",
        new="x_RD.abs().amax().expand(x_RD.shape[0], 1).float().clone()",
        tests=("tests/models/test_linear_int8.py",),
        why="a row's logits would depend on its companions: speculation changes the output",
    ),
)

STOPS = (
    Mutant(
        name="stop_token_inside_a_run_keeps_the_rest",
        file="engine/stop.py",
        old="return index + 1, FinishReason.STOP",
        new="return len(tokens), FinishReason.STOP",
        tests=(STOP, f"{IDENTITY}::test_stop_token_at_every_position_of_a_run"),
        why="what a pass committed behind the end never existed",
    ),
    Mutant(
        name="stop_tokens_are_looked_for_at_the_end_of_a_run",
        file="engine/stop.py",
        old="if (token in self.token_ids and count >= self.min_tokens) or hit_string:",
        new="if (index + 1 == len(tokens) and token in self.token_ids and count >= self.min_tokens) or hit_string:",
        tests=(f"{IDENTITY}::test_stop_token_at_every_position_of_a_run",),
        why="a kept draft may be the end",
    ),
    Mutant(
        name="stop_string_is_looked_for_in_one_token",
        file="engine/stop.py",
        old="searched = max(0, len(self._text) - max((len(s) for s in self._stop), default=1) + 1)",
        new="searched = len(self._text)",
        tests=(STOP,),
        why="a stop string may begin in one token and end in another",
    ),
    Mutant(
        name="stop_string_stays_in_the_text",
        file="engine/stop.py",
        old="        self._text = self._text[: min(found)]\n",
        new="",
        tests=(STOP,),
        why="text ends before the stop string",
    ),
    Mutant(
        name="streamed_text_runs_into_the_stop_string",
        file="engine/stop.py",
        old="            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):\n",
        new="            for size in range(min(len(stop) - 2, len(self._text)), longest, -1):\n",
        tests=(STOP,),
        why="text that was handed out can not be taken back when the stop string is complete",
    ),
    Mutant(
        name="max_tokens_is_passed_by_one",
        file="engine/stop.py",
        old="if count >= self.limit:",
        new="if count > self.limit:",
        tests=(f"{IDENTITY}::test_limit_at_every_position",),
        why="a run may reach over the limit, the output may not",
    ),
)

COUNTS = (
    Mutant(
        name="drafts_behind_a_stop_are_counted",
        file="engine/report.py",
        old="deepest = len(tokens) if was_cut else max(depths, default=0)",
        new="deepest = max(depths, default=0)",
        tests=(f"{REPORT}::test_tokens_behind_a_stop_never_existed",),
        why="drafts that could not have been committed would lower the acceptance rate",
    ),
    Mutant(
        name="accepted_drafts_behind_a_stop_are_counted",
        file="engine/report.py",
        old="accepted = min(len(tokens), len(verdict.path))",
        new="accepted = len(verdict.path)",
        tests=(f"{REPORT}::test_tokens_behind_a_stop_never_existed",),
        why="a draft token behind the end was not committed",
    ),
    Mutant(
        name="prefill_is_counted",
        file="metrics.py",
        old="if report.is_prefill:",
        new="if report.is_prefill and report.drafter:",
        tests=(f"{REPORT}::test_prefill_counts_nowhere",),
        why="the token that comes from reading the prompt is no merit of decoding",
    ),
    Mutant(
        name="accepted_length_over_all_passes",
        file="metrics.py",
        old="return 1 + self.accepted / self.steps if self.steps else None",
        new="return 1 + self.accepted / self.passes if self.steps else None",
        tests=(f"{REPORT}::test_accepted_length_is_over_steps_and_tokens_per_pass_over_passes",),
        why="passes without drafts are in tokens_per_pass and in no acceptance",
    ),
    Mutant(
        name="a_depth_is_reached_where_nothing_was_drafted",
        file="engine/report.py",
        old="len(verdict.path) + (last_kept in proposal.parents))",
        new="len(verdict.path) + 1)",
        tests=(f"{REPORT}::test_leaf_reached_at_half_depth_is_not_a_reach_below",),
        why="the kept branch of a tree may be shorter than the tree",
    ),
)

DRAFTERS = (
    Mutant(
        name="refused_drafts_stay_in_the_draft_models_cache",
        file="drafters/reader.py",
        old="            if draft != token:\n                break\n",
        new="            if draft != token:\n                pass\n",
        tests=(f"{LM}::test_nothing_is_drafted_behind_refused_drafts",),
        why="later drafts would be drafted behind tokens that are not there",
    ),
    Mutant(
        name="handed_over_law_is_not_the_law_of_the_draw",
        file="drafters/choice.py",
        old="probs_BV = vocabulary.spread(warped_BU.softmax(dim=-1))",
        new="probs_BV = vocabulary.spread(logits_BU[drawn].softmax(dim=-1))",
        tests=(f"{LM}::test_handed_over_laws_are_those_that_were_drawn_from",),
        why="rejection is exact only for the law that the token was really drawn from",
    ),
    Mutant(
        name="all_drafts_of_a_chain_share_one_number",
        file="drafters/choice.py",
        old="len(request.tokens) + depth, purpose)",
        new="len(request.tokens), purpose)",
        tests=(f"{LM}::test_modes_may_be_mixed_in_one_batch",),
        why="draft tokens of one chain must be drawn independently, and shared noise is that of the token's own position",
    ),
    Mutant(
        name="taps_of_the_row_before",
        file="engine/taps.py",
        old="for row in path]))",
        new="for row in (0, *path[:-1])]))",
        tests=(f"{TAPS}::test_every_committed_tokens_taps_arrive",),
        why="a feature belongs to the position whose row computed it; one off still drafts, badly",
    ),
    Mutant(
        name="features_beside_their_own_token",
        file="drafters/eagle_reader.py",
        old="following = tokens[start + 1 : start + 1 + size]",
        new="following = tokens[start : start + size]",
        tests=(f"{EAGLE}::test_drafts_in_the_engine_equal_those_from_scratch",),
        why="a feature stands beside the token that follows it",
    ),
    Mutant(
        name="entries_of_drafts_outlive_the_verdict",
        file="drafters/eagle_walk.py",
        old="        slab[0][rows_R, :, self._slots_R] = keys\n",
        new="        late = slice(-1, None) if len(keys) < 5 else slice(None)\n"
        "        slab[0][rows_R[late], :, self._slots_R[late]] = keys[late]\n",
        tests=(f"{EAGLE}::test_drafts_in_the_engine_equal_those_from_scratch",),
        why="kept tokens' entries are made anew from the target's taps",
    ),
    Mutant(
        name="hopeless_levels_are_read",
        file="drafters/tree.py",
        old="        if self.shape.min_level and sum(",
        new="        if False and sum(",
        tests=(f"{NATIVE_EAGLE}::test_trees_grown_in_one_call_equal_those_grown_by_levels",),
        why="a pass of the draft model for less than it takes is what makes trees slow",
    ),
    Mutant(
        name="drawn_trees_are_grown_as_if_greedy",
        file="drafters/eagle.py",
        old="self._entries.can_grow and _takes_best(requests)",
        new="self._entries.can_grow",
        tests=(f"{NATIVE_EAGLE}::test_drafts_in_the_engine_equal_those_from_scratch",),
        why="above temperature 0 candidates are ranked with the verifier's noise; without it few of them are kept",
    ),
    Mutant(
        name="a_norm_between_levels_is_left_out",
        file="drafters/eagle_native.py",
        old="return self._head.is_feedback_plain",
        new="return True",
        tests=(f"{NATIVE_EAGLE}::test_a_head_that_norms_its_outputs_grows_by_levels",),
        why="the one native call knows no norm there",
    ),
)
