"""Faults in training's native forms: what a head would learn from wrong gradients, without anybody noticing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["TRAINING"]

LOSSES = "tests/train/test_native_losses.py"
ATTENTION = "tests/train/test_native_attention.py"
ROWS = "tests/train/test_native_rows.py"
SAME_ATTENTION = f"{ATTENTION}::test_native_attention_is_the_plain_one"

TRAINING = (
    Mutant(
        name="only_the_last_piece_moves_the_head",
        file="native/training.py",
        old="job.is_first = 0",
        new="job.is_first = 1",
        tests=(f"{LOSSES}::test_pieces_add_up",),
        why="the head's gradient is summed over all pieces of rows",
    ),
    Mutant(
        name="rows_weigh_alike",
        file="train/losses.py",
        old="factors_R = (scales_R * weights_R[rows]).float()",
        new="factors_R = scales_R.float()",
        tests=(f"{LOSSES}::test_native_loss_is_the_eager_one",),
        why="each unroll step has a weight of its own",
    ),
    Mutant(
        name="logits_are_left_relative",
        file="native/training.py",
        old=".log_() + shifts_R.unsqueeze(1), shifts_R + sums_R.log()",
        new=".log_() + shifts_R.unsqueeze(1), sums_R.log()",
        tests=(f"{LOSSES}::test_native_loss_is_the_eager_one",),
        why="exponentials are relative to one of the row's logits, and so is their sum",
    ),
    Mutant(
        name="a_query_sees_the_next_key",
        file="train/attention.py",
        old="at = torch.tensor([index for _, indexes in texts for index in indexes], dtype=torch.int32)",
        new="at = torch.tensor([index + 1 for _, indexes in texts for index in indexes], dtype=torch.int32)",
        tests=(SAME_ATTENTION, f"{ATTENTION}::test_nobody_sees_later_keys_or_another_text"),
        why="the head would be trained on what it has to guess",
    ),
    Mutant(
        name="scores_are_not_scaled",
        file="native/training.py",
        old="job.scale, job.num_own = job.head_width**-0.5, len(own) // 2",
        new="job.scale, job.num_own = 1.0, len(own) // 2",
        tests=(SAME_ATTENTION,),
        why="the head that is served divides scores by the root of their width",
    ),
    Mutant(
        name="own_gradients_are_exchanged",
        file="native/training.py",
        old="(job.own_value_grads if index % 2 else job.own_key_grads)[index // 2] = CTrainHeads.of(grad)",
        new="(job.own_key_grads if index % 2 else job.own_value_grads)[index // 2] = CTrainHeads.of(grad)",
        tests=(SAME_ATTENTION,),
        why="keys and values of later steps come by turns",
    ),
    Mutant(
        name="padding_flows_back",
        file="native/training.py",
        old="out[len(self._indexes_Q) :].zero_()",
        new="out[len(self._indexes_Q) :].fill_(1)",
        tests=(f"{ATTENTION}::test_rows_of_no_text_are_zero",),
        why="queries of the padding belong to no text",
    ),
    Mutant(
        name="a_shared_matrix_forgets_its_earlier_uses",
        file="native/training_rows.py",
        old="is_first=sums is None)",
        new="is_first=True)",
        tests=(f"{ROWS}::test_a_shared_matrix_rounds_its_gradient_once", f"{ROWS}::test_the_whole_unroll"),
        why="every unroll step multiplies by the same matrices",
    ),
    Mutant(
        name="a_shared_matrix_counts_its_uses_twice",
        file="train/functions.py",
        old="is_last=not shared.num_uses",
        new="is_last=True",
        tests=(f"{ROWS}::test_a_shared_matrix_rounds_its_gradient_once", f"{ROWS}::test_the_whole_unroll"),
        why="the sums so far would be handed out at every use",
    ),
    Mutant(
        name="a_gradient_is_turned_onward",
        file="train/functions.py",
        old="ctx.kernels.rotate(_dense_heads(slopes[0]), *ctx.tables, back=True)",
        new="ctx.kernels.rotate(_dense_heads(slopes[0]), *ctx.tables, back=False)",
        tests=(f"{ROWS}::test_native_form_is_the_plain_one",),
        why="a gradient goes back by the opposite angle",
    ),
)
