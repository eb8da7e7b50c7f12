// Undoes the rotation of an int8 model's residual stream (models/rotation.py), where hidden states leave the pass.
#pragma once

#include "abi.h"
#include "vec.h"

namespace {

// A Hadamard transform over `power` pieces of `size` neighbours each, in place, not scaled.
INLINE void hadamard(float* x, int power, int size) {
    for (int half = size; half < power * size; half *= 2)
        for (float* at = x; at < x + power * size; at += 2 * half)
            for (int i = 0; i < half; i++) {
                const float a = at[i], b = at[i + half];
                at[i] = a + b;
                at[i + half] = a - b;
            }
}

// A row of model.hidden values, seen as [power][size]: Hadamard over the first, cosine transform over the second, signs.
void unrotate_row(const OutriderModel& model, float* x, float* scratch) {
    const int power = model.rotation_power, size = model.hidden / power;
    hadamard(x, power, size);
    // Turned, so that the short dimension's sums run along the long one.
    for (int k = 0; k < size; k++)
        for (int p = 0; p < power; p++) scratch[k * power + p] = x[p * size + k];
    for (int j = 0; j < size; j++) {
        constexpr int MOST = 64;
        for (int first = 0; first < power; first += MOST) {
            const int count = power - first < MOST ? power - first : MOST;
            float sums[MOST] = {};
            for (int k = 0; k < size; k++) {
                const float factor = model.rotation_cosines[j * size + k];
                const float* from = scratch + k * power + first;
                for (int p = 0; p < count; p++) sums[p] += factor * from[p];
            }
            for (int p = 0; p < count; p++) x[(first + p) * size + j] = sums[p];
        }
    }
    for (int i = 0; i < model.hidden; i++) x[i] *= model.rotation_signs[i];
}

}  // namespace
