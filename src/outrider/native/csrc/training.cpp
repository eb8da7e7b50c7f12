// Training's jobs as Python calls them.

#include "context.h"
#include "train.h"

namespace {

struct Call {
    const Kernels& kernels;
    void (*task)(const TrainLoss&, int, int, Barrier*);
    const TrainLoss& job;
    Pool& pool;
};

void run_loss(void* argument, int thread) {
    const Call& call = *(const Call*)argument;
    call.kernels.begin();
    call.task(call.job, thread, call.pool.size(), call.pool.barrier());
    call.kernels.end();
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
    const TrainKernels& train = kernels_of(*context).train;
    Call call{kernels_of(*context), part == LOSS_PACK ? train.pack_head : part == LOSS_LOGITS ? train.loss_logits : train.loss_gradients,
              *job, pool_of(*context)};
    const std::lock_guard<std::mutex> lock(turn_of(*context));
    call.pool.run(run_loss, &call);
}
