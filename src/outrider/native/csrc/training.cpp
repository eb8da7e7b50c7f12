// Training's jobs as Python calls them.

#include "context.h"
#include "train.h"

namespace {

// Runs task(kernels, thread, number of threads, their barrier) on all threads of a context.
template <class Task>
void run_training(OutriderContext& context, const Task& task) {
    struct Call {
        OutriderContext& context;
        const Task& task;
    } call{context, task};
    const std::lock_guard<std::mutex> lock(turn_of(context));
    pool_of(context).run(
        [](void* argument, int thread) {
            const Call& call = *(const Call*)argument;
            const Kernels& kernels = kernels_of(call.context);
            Pool& pool = pool_of(call.context);
            kernels.begin();
            call.task(kernels.train, thread, pool.size(), pool.barrier());
            kernels.end();
        },
        &call);
}

}  // namespace

enum { LOSS_PACK, LOSS_LOGITS, LOSS_GRADIENTS };

// Bytes of scratch memory for a piece of that many rows.
OUTRIDER_EXPORT int64_t outrider_loss_bytes(int64_t num_rows, int64_t width, int64_t num_outputs, int32_t num_threads) {
    const LossLayout layout(num_rows, width, num_outputs);
    return layout.own + num_threads * layout.own_bytes;
}

// One part of a loss: its head packed, the logits of a piece of rows, or that piece's gradients.
OUTRIDER_EXPORT void outrider_loss(OutriderContext* context, int32_t part, const TrainLoss* job) {
    run_training(*context, [&](const TrainKernels& train, int thread, int num_threads, Barrier* barrier) {
        const auto run = part == LOSS_PACK     ? train.pack_head
                         : part == LOSS_LOGITS ? train.loss_logits
                                               : train.loss_gradients;
        run(*job, thread, num_threads, barrier);
    });
}

// Bytes of scratch memory for one thread.
OUTRIDER_EXPORT int64_t outrider_attention_bytes(const TrainAttention* job) { return AttentionLayout(*job).end; }

OUTRIDER_EXPORT void outrider_attention(OutriderContext* context, int32_t is_backward, TrainAttention* job) {
    job->next_unit = 0;
    run_training(*context, [&](const TrainKernels& train, int thread, int, Barrier*) {
        (is_backward ? train.attend_back : train.attend)(*job, thread);
    });
}

OUTRIDER_EXPORT void outrider_rows(OutriderContext* context, int32_t kind, const TrainRows* job) {
    run_training(*context, [&](const TrainKernels& train, int thread, int num_threads, Barrier* barrier) {
        train.rows(*job, kind, thread, num_threads, barrier);
    });
}

OUTRIDER_EXPORT int64_t outrider_weight_bytes(const TrainWeight* job, int32_t num_threads) {
    return WeightLayout(*job).bytes(num_threads);
}

OUTRIDER_EXPORT void outrider_weight_gradient(OutriderContext* context, const TrainWeight* job) {
    run_training(*context, [&](const TrainKernels& train, int thread, int num_threads, Barrier* barrier) {
        train.weight_gradient(*job, thread, num_threads, barrier);
    });
}
