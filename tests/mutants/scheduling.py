"""Faults in admission, memory, sharing, preemption and isolation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["SCHEDULERS"]

PREFIXES = "tests/engine/test_prefixes.py"
QUEUE = "tests/engine/test_queue.py"
SCHEDULER = "tests/engine/test_scheduler.py"
TARGETS = "tests/engine/test_scheduler_targets.py"
FAULTS = "tests/engine/test_faults.py"
PUT_BACK = f"{SCHEDULER}::test_sequences_put_back_in_the_middle_of_speculation_go_on_as_if_nothing_had_happened"

SCHEDULERS = (
    Mutant(
        name="put_back_loses_the_sampling_history",
        file="engine/scheduler.py",
        old="            each.num_preemptions += 1\n",
        new="            each.num_preemptions += 1\n            each.state.num_output = 0\n",
        tests=(PUT_BACK,),
        why="noise is keyed by the absolute position, which a sequence that is read again must still know",
    ),
    Mutant(
        name="put_back_keeps_only_the_prompt",
        file="engine/scheduler.py",
        old="            each.num_preemptions += 1\n",
        new="            each.num_preemptions += 1\n            del each.tokens[each.num_prompt :]\n",
        tests=(PUT_BACK,),
        why="what was committed was delivered already; it must be read, not decoded, again",
    ),
    Mutant(
        name="put_back_keeps_its_slot",
        file="engine/scheduler.py",
        old="            self.memory.give(each.slot)\n",
        new="",
        tests=(PUT_BACK,),
        why="memory that nobody owns is never given back",
    ),
    Mutant(
        name="the_oldest_is_put_back",
        file="engine/scheduler.py",
        old="            youngest = max(",
        new="            youngest = min(",
        tests=(f"{SCHEDULER}::test_the_oldest_gets_ahead_while_the_young_give_way",),
        why="those that are nearest to their end would be computed again and again",
    ),
    Mutant(
        name="growth_asks_nobody",
        file="engine/scheduler.py",
        old="        if not self.prefixes.make_room(self.memory.growth(sequence.slot, sequence.key, room)):\n",
        new="        if sequence.slot == NO_SLOT:\n",
        tests=(PUT_BACK,),
        why="the budget is hard for sequences that grow, too",
    ),
    Mutant(
        name="the_drafter_costs_nothing",
        file="engine/memory.py",
        old="        return sum(part.memory_bytes(num_tokens) for part in self._parts)\n",
        new="        return 0\n",
        tests=(PUT_BACK, f"{TARGETS}::test_a_crowd_in_little_memory_gives_what_each_gives_alone"),
        why="heads and draft models keep keys and values of their own",
    ),
    Mutant(
        name="growth_is_not_counted",
        file="engine/memory.py",
        old="max(self._slot_bytes[slot], self.slot_cost(num_tokens)))",
        new="self._slot_bytes[slot])",
        tests=(PUT_BACK,),
        why="a slot takes what it has grown to",
    ),
    Mutant(
        name="scopes_share",
        file="engine/prefixes.py",
        old="            if entry.scope == scope:\n",
        new="            if entry is not None:\n",
        tests=(PREFIXES, f"{SCHEDULER}::test_scopes_do_not_share_prompts"),
        why="how fast a prompt is read would tell one user what another has asked",
    ),
    Mutant(
        name="remembered_texts_are_everybodys",
        file="drafters/suffix.py",
        old="self._share(self._scopes.get(sequence))",
        new="self._share(None)",
        tests=("tests/drafters/test_suffix.py::test_scopes_learn_nothing_from_each_other",),
        why="accepted drafts would tell one user what another was answered",
    ),
    Mutant(
        name="the_newest_prefix_goes_first",
        file="engine/prefixes.py",
        old="        for entry in droppable:\n",
        new="        for entry in reversed(droppable):\n",
        tests=(f"{PREFIXES}::test_entries_make_room_oldest_first_and_only_if_that_helps",),
        why="the least recently used is the least likely to be wanted",
    ),
    Mutant(
        name="choices_run_on_an_empty_cache",
        file="engine/scheduler.py",
        old="                    self.memory.cache.copy_prefix(first.slot, other.slot, chunk.ticket.num_read)\n",
        new="                    pass\n",
        tests=("tests/engine/test_scheduler_targets.py::test_all_choices_go_on_from_the_prompt",),
        why="the first choice alone has read the prompt",
    ),
    Mutant(
        name="the_part_that_is_read_ignores_what_was_read",
        file="engine/reading.py",
        old="        part = ticket.tokens[start : start + size]\n",
        new="        part = ticket.tokens[:size]\n",
        tests=("tests/engine/test_engine.py::test_prompts_are_read_in_chunks", PUT_BACK),
        why="each part begins where the last one ended",
    ),
    Mutant(
        name="the_first_token_comes_from_a_middle_part",
        file="engine/reading.py",
        old="is_last=size == ticket.num_unread",
        new="is_last=size == len(part)",
        tests=("tests/engine/test_engine.py::test_prompts_are_read_in_chunks",),
        why="only the law behind the whole prompt is the answer's",
    ),
    Mutant(
        name="law_of_the_parts_first_row",
        file="engine/step.py",
        old="ends = [part.start + part.num_rows - 1 for",
        new="ends = [part.start for",
        tests=("tests/engine/test_identity.py::test_plain_output_is_a_walk_through_the_table",),
        why="the next token's law is behind the last row",
    ),
    Mutant(
        name="recomputation_counts_as_decoding",
        file="engine/report.py",
        old="        is_prefill=True,\n",
        new="        is_prefill=not ticket.was_put_back,\n",
        tests=(PUT_BACK,),
        why="a pass that reads what was computed before is no decode pass, and would flatter or spoil every rate",
    ),
    Mutant(
        name="one_scope_takes_all_turns",
        file="engine/queue.py",
        old="        self._turns[ticket.request.scope] = self._num_taken\n",
        new="",
        tests=(QUEUE,),
        why="whoever sends most would be served alone",
    ),
    Mutant(
        name="the_urgent_starve_the_patient",
        file="engine/queue.py",
        old="        if self._num_overtaking >= PATIENCE:\n",
        new="        if self._num_overtaking < 0:\n",
        tests=(f"{QUEUE}::test_the_patient_are_not_starved_by_the_urgent",),
        why="everybody is started some time",
    ),
    Mutant(
        name="what_a_fault_left_is_shared",
        file="engine/scheduler.py",
        old="        if sequence.finish_reason is FinishReason.ERROR:\n            self.memory.give(slot)\n        else:\n",
        new="        if slot != NO_SLOT:\n",
        tests=(f"{FAULTS}::test_rows_of_a_pass_that_failed_are_not_shared",),
        why="a pass that failed may have written rows that no committed token has",
    ),
    Mutant(
        name="a_fault_ends_everybody",
        file="engine/judge.py",
        old="            faults[index] = fault\n",
        new="            faults = dict.fromkeys(range(len(sequences)), fault)\n",
        tests=(f"{FAULTS}::test_a_law_that_cannot_be_computed_ends_its_own_request",),
        why="others in the pass have laws of their own",
    ),
)
