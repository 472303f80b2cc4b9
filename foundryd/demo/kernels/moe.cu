// SPDX-License-Identifier: Apache-2.0
//
// Routing and experts.  A *slot* is one (token, choice) on the rank that computes it; its token's row starts at
// rows + slot / choices * stride and holds `width` values, then `choices` marks: an expert's number plus one, or 0
// for no token.  A slot whose expert lives elsewhere is passed over, and gives zeros in the end.
#include "portable.h"

IMAGE()

// Written by the engine when it starts: the softmax's table, the same on every rank, and the rank's place in the mesh.
struct Place {
  int tp;
  int ep;
};
GLOBAL float decay[kDecaySteps] = {};
GLOBAL Place place = {-1, -1};

// Picks the experts of each token, the lowest number first among equals, and their unnormalised weights.
KERNEL(route, int *chosen, float *weights, const float *logits, int rows, int experts, int top_k, float scale) {
  FOR_EACH(row, rows) {
    const float *logit = logits + row * experts;
    int *mine = chosen + row * top_k;
    for (int choice = 0; choice < top_k; ++choice) {
      int best = -1;
      for (int e = 0; e < experts; ++e) {
        bool taken = false;
        for (int j = 0; j < choice; ++j) taken = taken || mine[j] == e;
        if (!taken && (best < 0 || logit[e] > logit[best])) best = e;
      }
      mine[choice] = best;
      const float below = nearest((logit[mine[0]] - logit[best]) * scale);
      weights[row * top_k + choice] = decay[below < kDecaySteps - 1 ? static_cast<int>(below) : kDecaySteps - 1];
    }
  }
}

// All-to-all: each slot goes to its own place in the block of the rank that has the expert.  The buffer was zeroed.
KERNEL(pack_slots, float *send, const float *h, const int *chosen, int rows, int width, int top_k, int local_experts) {
  FOR_EACH(item, rows * top_k) {
    const int expert = chosen[item];
    float *to = send + static_cast<long long>(expert / local_experts * rows * top_k + item) * (width + 1);
    const float *from = h + item / top_k * width;
    for (int i = 0; i < width; ++i) to[i] = from[i];
    to[width] = static_cast<float>(expert + 1);
  }
}

// All-gather: a row is the token, its marks and its weights.
KERNEL(pack_rows, float *send, const float *h, const int *chosen, const float *weights, int rows, int width, int top_k) {
  FOR_EACH(row, rows) {
    float *to = send + row * (width + 2 * top_k);
    for (int i = 0; i < width; ++i) to[i] = h[row * width + i];
    for (int j = 0; j < top_k; ++j) {
      to[width + j] = static_cast<float>(chosen[row * top_k + j] + 1);
      to[width + top_k + j] = weights[row * top_k + j];
    }
  }
}

DEVICE int local_expert(const float *rows, int slot, int choices, int stride, int width, int first, int count) {
  const int expert = static_cast<int>(rows[slot / choices * stride + width + slot % choices]) - 1 - first;
  return expert >= 0 && expert < count ? expert : -1;
}

// relu(gate) * up.  Learns from `place` which experts are local.
KERNEL(expert_gate, float *out, const float *gate_up, const float *rows, int slots, int choices, int stride, int width,
       int inner, int local_experts, float scale) {
  FOR_EACH(item, slots * tiles(inner)) {
    const int slot = item / tiles(inner);
    const int first = item % tiles(inner) * kTile;
    if (local_expert(rows, slot, choices, stride, width, place.ep * local_experts, local_experts) < 0) continue;
    for (int i = first; i < first + kTile && i < inner; ++i) {
      const float gate = gate_up[slot * 2 * inner + i];
      const float up = gate_up[slot * 2 * inner + inner + i];
      out[slot * inner + i] = quantise((gate > 0.0f ? gate : 0.0f) * up * scale, kExpert);
    }
  }
}

// Learns from a parameter which experts are local.  The result is a tp rank's part, not rounded.
KERNEL(expert_down, float *out, const float *active, const float *rows, const float *down, int slots, int choices,
       int stride, int width, int inner, int first_expert, int local_experts) {
  FOR_EACH(item, slots * tiles(width)) {
    const int slot = item / tiles(width);
    const int first = item % tiles(width) * kTile;
    const int expert = local_expert(rows, slot, choices, stride, width, first_expert, local_experts);
    for (int i = first; i < first + kTile && i < width; ++i) {
      out[slot * width + i] =
          expert < 0 ? 0.0f : dot(active + slot * inner, down + (expert * width + i) * inner, inner);
    }
  }
}

// All-to-all: adds up what came back of each slot.  Only the rank with its expert sent anything but zeros.
KERNEL(combine_slots, float *out, const float *back, const float *weights, int rows, int width, int top_k,
       int senders) {
  FOR_EACH(row, rows) {
    for (int i = 0; i < width; ++i) out[row * width + i] = 0.0f;
    for (int j = 0; j < top_k; ++j) {
      const int slot = row * top_k + j;
      for (int s = 0; s < senders; ++s) {
        const float *from = back + (static_cast<long long>(s) * rows * top_k + slot) * width;
        for (int i = 0; i < width; ++i) out[row * width + i] += weights[slot] * from[i];
      }
    }
  }
}

// All-gather: adds up the local experts' part for every rank's tokens, before the reduce-scatter.
KERNEL(combine_rows, float *out, const float *outputs, const float *gathered, int rows, int width, int top_k) {
  FOR_EACH(item, rows * width) {
    const int row = item / width;
    const float *weights = gathered + row * (width + 2 * top_k) + width + top_k;
    float sum = 0.0f;
    for (int j = 0; j < top_k; ++j) sum += weights[j] * outputs[(row * top_k + j) * width + item % width];
    out[item] = sum;
  }
}

KERNEL(add_experts, float *x, const float *mixed, const float *weights, int rows, int width, int top_k, float scale) {
  FOR_EACH(item, rows * width) {
    float total = 0.0f;
    for (int j = 0; j < top_k; ++j) total += weights[item / width * top_k + j];
    x[item] = clamp(x[item] + nearest(divide(mixed[item] * scale, total)), kResidual);
  }
}
