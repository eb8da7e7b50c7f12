// What a handle holds, for the calls that are not passes.
#pragma once

#include <mutex>

#include "kernels.h"
#include "pool.h"

const Kernels& kernels_of(const OutriderContext& context);
Pool& pool_of(OutriderContext& context);
std::mutex& turn_of(OutriderContext& context);  // calls on one handle take turns
void run_pass(OutriderContext& context, const OutriderModel& model, const OutriderPass& pass);  // by whose turn it is
