"""Faults in verifiers, keyed noise and samplers: each makes the output follow another law, or another seed's."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["NOISE", "SAMPLERS", "VERIFIERS"]

SELECT = "tests/verify/test_select.py::test_known_greedy_tokens_give_the_verdicts_of_a_walk_that_asks"
EXACT_LAW = "tests/audit/test_law.py::test_the_real_verifiers_are_lossless[0]"
LAWS = "tests/sampling/test_laws.py"
CHAIN = "tests/verify/test_chain.py"
IDENTITY = "tests/engine/test_identity.py"
SAME_OUTPUT = f"{IDENTITY}::test_output_is_plain_output"
KEPT_RUNS = f"{IDENTITY}::test_output_is_plain_output_where_most_drafts_are_right"

VERIFIERS = (
    Mutant(
        name="correction_is_drawn_from_the_target",
        file="sampling/accept.py",
        old="rest_BV = (target_probs_BV - draft_probs_BV).clamp_min(0)",
        new="rest_BV = target_probs_BV.clone()",
        tests=(EXACT_LAW,),
        why="what the drafter likes is offered twice: once as the draft, once more as the correction",
    ),
    Mutant(
        name="acceptance_by_the_square_root",
        file="sampling/accept.py",
        old="(uniforms_B * draft_B < target_B)",
        new="(uniforms_B * draft_B.sqrt() < target_B.sqrt())",
        tests=(EXACT_LAW,),
        why="min(1, sqrt(target / draft)) keeps too many drafts",
    ),
    Mutant(
        name="acceptance_ignores_the_draft_law",
        file="sampling/accept.py",
        old="(uniforms_B * draft_B < target_B)",
        new="(uniforms_B < target_B)",
        tests=(EXACT_LAW,),
        why="keeping with probability target(token) fits deterministic candidates, not drawn ones",
    ),
    Mutant(
        name="bonus_from_the_row_before",
        file="verify/chain.py",
        old="places = [_place(proposals[walk], num_kept[walk], sequences[walk]) for walk in whole]",
        new="places = [_place(proposals[walk], max(num_kept[walk] - 1, 0), sequences[walk]) for walk in whole]",
        tests=(EXACT_LAW,),
        why="the bonus token's law is that behind the last draft token",
    ),
    Mutant(
        name="draft_law_of_the_first_level",
        file="verify/chain.py",
        old="rows.append(chain.draft_probs_NV[level])",
        new="rows.append(chain.draft_probs_NV[0])",
        tests=(EXACT_LAW,),
        why="each draft token was drawn from a law of its own",
    ),
    Mutant(
        name="walk_finds_the_token_under_any_parent",
        file="verify/compare.py",
        old="child = children[walk].get((_last(paths[walk]), token))",
        new="child = next((n for (_, t), n in children[walk].items() if t == token and n > _last(paths[walk])), None)",
        tests=(EXACT_LAW,),
        why="a cousin's subtree was computed behind other tokens",
    ),
    Mutant(
        name="walk_goes_on_through_the_first_child",
        file="verify/compare.py",
        old="child = children[walk].get((_last(paths[walk]), token))",
        new="child = next((n for (p, _), n in children[walk].items() if p == _last(paths[walk])), None)",
        tests=(EXACT_LAW,),
        why="commits what was drafted instead of what was drawn",
    ),
    Mutant(
        name="greedy_walk_takes_a_cousin",
        file="verify/compare.py",
        old="        child = children.get((child, behind[child + 1]))\n",
        new="        child = next((n for (p, t), n in children.items() if p >= child and t == behind[child + 1]), None)\n",
        tests=(SELECT,),
        why="a cousin's subtree was computed behind other tokens",
    ),
    Mutant(
        name="greedy_chain_is_kept_past_a_refusal",
        file="verify/compare.py",
        old="next((node for node, agrees in enumerate(agreeing) if not agrees), len(proposal))",
        new="sum(agreeing)",
        tests=(SELECT,),
        why="what stands behind a refused token was computed behind that token",
    ),
    Mutant(
        name="law_of_the_parent_node",
        file="verify/compare.py",
        old="return Place(sequence=sequence, node=_last(path),",
        new="return Place(sequence=sequence, node=_last(path[:-1]),",
        tests=(EXACT_LAW,),
        why="a node's row gives the law behind it; its parent's row gives the law of the node itself",
    ),
)

NOISE = (
    Mutant(
        name="acceptance_reuses_the_noise_of_drafting",
        file="sampling/laws.py",
        old="self._keys(places, Purpose.ACCEPT)",
        new="self._keys(places, Purpose.DRAFT)",
        tests=(f"{CHAIN}::test_two_committed_tokens_follow_the_target_with_the_real_noise",),
        why="whether a draft token is kept would depend on the number that chose it",
    ),
    Mutant(
        name="correction_reuses_the_noise_of_drafting",
        file="sampling/laws.py",
        old="self._keys(places, Purpose.RESIDUAL)",
        new="self._keys(places, Purpose.DRAFT)",
        tests=(f"{CHAIN}::test_two_committed_tokens_follow_the_target_with_the_real_noise",),
        why="the noise of a refused draft favours that draft; as correction it must be drawn afresh",
    ),
    Mutant(
        name="noise_has_one_purpose",
        file="rng.py",
        old="for word in (choice, position, int(purpose)):",
        new="for word in (choice, position):",
        tests=("tests/test_rng.py::test_purposes_of_one_position_are_pairwise_independent",),
        why="drafting, acceptance and correction would share their numbers",
    ),
    Mutant(
        name="noise_forgets_the_drafts_before_it",
        file="sampling/laws.py",
        old="position = state.num_prompt + state.num_output + len(place.path)",
        new="position = state.num_prompt + state.num_output",
        tests=(f"{KEPT_RUNS}[chain-seeded]",),
        why="seeded output would depend on how many tokens a pass happened to commit",
    ),
    Mutant(
        name="noise_counts_output_only",
        file="sampling/laws.py",
        old="position = state.num_prompt + state.num_output + len(place.path)",
        new="position = state.num_output + len(place.path)",
        tests=(f"{LAWS}::test_choice_is_the_noised_argmax_of_its_absolute_position",),
        why="positions are absolute: drafters that share the noise count the prompt, and a chat's turns must not repeat it",
    ),
    Mutant(
        name="choices_share_their_noise",
        file="sampling/laws.py",
        old="noise_key(state.seed, state.choice, position, purpose)",
        new="noise_key(state.seed, 0, position, purpose)",
        tests=(f"{IDENTITY}::test_choices_differ_and_are_the_same_for_any_drafter",),
        why="all choices of a request would be the same text",
    ),
    Mutant(
        name="seed_is_ignored",
        file="engine/engine.py",
        old="seed = params.seed if params.seed is not None else self._entropy()",
        new="seed = self._entropy()",
        tests=(f"{SAME_OUTPUT}[4-random-seeded]",),
        why="the same seed must give the same output",
    ),
    Mutant(
        name="seeded_requests_are_verified_by_rejection",
        file="engine/sequence.py",
        old='if self.params.seed is not None or verification == "compare":',
        new='if verification == "compare":',
        tests=(f"{SAME_OUTPUT}[4-drawn-seeded]",),
        why="rejection keeps the law but not the output: it would depend on the drafter",
    ),
)

SAMPLERS = (
    Mutant(
        name="penalties_do_not_count_the_path",
        file="sampling/state.py",
        old="        for token in path:\n",
        new="        for token in ():\n",
        tests=(
            f"{KEPT_RUNS}[chain-greedy-penalties]",
            f"{KEPT_RUNS}[tree-seeded-penalties]",
        ),
        why="draft tokens that lead to a node are history there",
    ),
    Mutant(
        name="a_walk_leaves_its_tokens_in_the_history",
        file="sampling/state.py",
        old="counts = dict(self._counts)",
        new="counts = self._counts",
        tests=(
            f"{KEPT_RUNS}[chain-greedy-penalties]",
            f"{KEPT_RUNS}[tree-seeded-penalties]",
        ),
        why="looking at a node must not change what is committed",
    ),
    Mutant(
        name="the_prompt_counts_as_output",
        file="sampling/state.py",
        old="dict.fromkeys(prompt_tokens, 0)",
        new="dict.fromkeys(prompt_tokens, 1)",
        tests=("tests/sampling/test_state.py",),
        why="frequency and presence penalties look at the output alone",
    ),
    Mutant(
        name="min_tokens_ignores_the_path",
        file="sampling/state.py",
        old="self.num_output + len(path) < self.params.min_tokens",
        new="self.num_output < self.params.min_tokens",
        tests=(f"{KEPT_RUNS}[chain-seeded-min-tokens]",),
        why="behind enough draft tokens the end is allowed again",
    ),
    Mutant(
        name="bad_words_ignore_the_path",
        file="sampling/state.py",
        old="recent = (*self._output[-longest:], *path)",
        new="recent = tuple(self._output[-longest:])",
        tests=(f"{KEPT_RUNS}[chain-seeded-bad-words]",),
        why="a banned sequence may begin in the drafts",
    ),
    Mutant(
        name="top_p_before_top_k",
        file="sampling/warp.py",
        old="is_whole=num_top > 0)",
        new="is_whole=False)",
        tests=(f"{LAWS}::test_order_of_processing_differs_from_its_neighbours",),
        why="top_p is a share of what top_k left, renormalised",
    ),
    Mutant(
        name="min_p_before_temperature",
        file="sampling/warp.py",
        old="dense_BV = _cut_min_p(_apply_temperature(logits_BV, params), params)",
        new="dense_BV = _apply_temperature(_cut_min_p(logits_BV, params), params)",
        tests=(f"{LAWS}::test_order_of_processing_differs_from_its_neighbours",),
        why="min_p compares probabilities at the request's temperature",
    ),
    Mutant(
        name="min_p_is_left_out_where_another_cut_is_asked_for",
        file="sampling/warp.py",
        old="    if not any(p.min_p for p in params):\n",
        new="    if not any(p.min_p for p in params) or any(p.top_p < 1 for p in params):\n",
        tests=(f"{LAWS}::test_order_of_processing_differs_from_its_neighbours",),
        why="a field is honoured or refused, and one row's fields are no other row's business",
    ),
    Mutant(
        name="bias_behind_the_penalties",
        file="sampling/laws.py",
        old=("    _add_bias(logits_BV, [state.params for state in states])\n    _penalise(logits_BV, states, paths)\n"),
        new=("    _penalise(logits_BV, states, paths)\n    _add_bias(logits_BV, [state.params for state in states])\n"),
        tests=(f"{LAWS}::test_order_of_processing_differs_from_its_neighbours",),
        why="one documented order of processing, and the repetition penalty does not commute with a bias",
    ),
    Mutant(
        name="repetition_penalty_divides_what_is_negative",
        file="sampling/laws.py",
        old="torch.where(values > 0, values / repetition, values * repetition)",
        new="values / repetition",
        tests=(f"{LAWS}::test_repetition_penalty_makes_every_seen_token_less_likely_and_rewards_below_one",),
        why="dividing a negative logit makes a repeated token likelier",
    ),
    Mutant(
        name="argmax_of_the_row_before",
        file="verify/base.py",
        old="return self._tokens[first : first + num_nodes + 1]",
        new="return [self._tokens[first], *self._tokens[first : first + num_nodes]]",
        tests=("tests/engine/test_judge.py",),
        why="node i's row is i + 1 behind the root's, in passes without logits too",
    ),
    Mutant(
        name="argmax_for_everybody",
        file="engine/judge.py",
        old="all(s.state.is_plain_greedy and s.logprobs is None for s in sequences)",
        new="sequences[0].state.is_plain_greedy and sequences[0].logprobs is None",
        tests=("tests/engine/test_judge.py",),
        why="one request that penalises, draws or reads log-probabilities needs the pass's logits",
    ),
    Mutant(
        name="argmax_of_rounded_logits",
        file="models/linear.py",
        old="        if len(open_rows):\n",
        new="        if len(open_rows) > len(rounded):\n",
        tests=("tests/models/test_linear.py",),
        why="bfloat16 makes ties of unequal logits, and the lowest id of a false tie is not the argmax",
    ),
    Mutant(
        name="logprobs_by_depth_instead_of_node",
        file="engine/commit.py",
        old="tokens = _commit_one(sequence, run, index, (ROOT, *verdict.path), judged.laws)",
        new="tokens = _commit_one(sequence, run, index, tuple(range(ROOT, len(verdict.path))), judged.laws)",
        tests=(f"{IDENTITY}::test_logprobs_do_not_depend_on_drafting",),
        why="right for chains; in a tree node i is not at depth i",
    ),
    Mutant(
        name="logprobs_of_the_row_behind",
        file="sampling/laws.py",
        old="rows = self._logits_RV[[self._first_rows[sequence] + node + 1 for node in nodes]]",
        new="rows = self._logits_RV[[self._first_rows[sequence] + max(node, 0) for node in nodes]]",
        tests=(f"{IDENTITY}::test_logprobs_do_not_depend_on_drafting",),
        why="node i's row is i + 1 behind the root's",
    ),
    Mutant(
        name="processed_logprobs_forget_the_path",
        file="engine/commit.py",
        old="paths = [tokens[:depth] for depth in range(count)]",
        new="paths = [() for _ in range(count)]",
        tests=(f"{IDENTITY}::test_logprobs_do_not_depend_on_drafting",),
        why="processed log-probabilities are those of the law that the token was drawn from, penalties included",
    ),
)
