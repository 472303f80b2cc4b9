// SPDX-License-Identifier: Apache-2.0
//
// Kernels that know their rank from their *code*: as a compiler folds a rank's vocabulary range into a kernel, this
// image has the first token and the first expert of its rank inside, under the same function names on every rank.
// On a GPU they are NVRTC definitions.  For the software driver the engine writes them behind the mark in the built
// image; both are out of reach there until it has, so an image that nobody baked computes nothing but zeros.
#include "portable.h"

IMAGE()

#ifdef __CUDACC__
DEVICE int first_token() { return FOUNDRYD_FIRST_TOKEN; }
DEVICE int first_expert() { return FOUNDRYD_FIRST_EXPERT; }
#else
struct Baked {
  char mark[16];
  int first_token;
  int first_expert;
};
// Volatile, so that the compiler does not fold what the engine will change.
static const volatile Baked baked = {{'f', 'o', 'u', 'n', 'd', 'r', 'y', 'd', '-', 'b', 'a', 'k', 'e', 'd', '-', '1'},
                                     1 << 30,
                                     1 << 30};
DEVICE int first_token() { return baked.first_token; }
DEVICE int first_expert() { return baked.first_expert; }
#endif

// A vocabulary-parallel embedding: zeros for a token of another rank, to be added over tp.
KERNEL(embed, float *x, const int *tokens, const float *table, int rows, int width, int local_vocab) {
  FOR_EACH(row, rows) {
    const int token = tokens[row] - first_token();
    const bool here = token >= 0 && token < local_vocab;
    for (int i = 0; i < width; ++i) x[row * width + i] = here ? table[token * width + i] : 0.0f;
  }
}

// Gate and up projections of each slot, see moe.cu.
KERNEL(expert_up, float *out, const float *rows, const float *gate_up, int slots, int choices, int stride, int width,
       int outputs, int local_experts, float scale) {
  const int first_local = first_expert();
  FOR_EACH(item, slots * tiles(outputs)) {
    const int slot = item / tiles(outputs);
    const int first = item % tiles(outputs) * kTile;
    const float *row = rows + slot / choices * stride;
    const int expert = static_cast<int>(row[width + slot % choices]) - 1 - first_local;
    if (expert < 0 || expert >= local_experts) continue;
    for (int o = first; o < first + kTile && o < outputs; ++o) {
      out[slot * outputs + o] =
          quantise(dot(row, gate_up + (expert * outputs + o) * width, width) * scale, kActivation);
    }
  }
}
