// SPDX-License-Identifier: Apache-2.0
//
// Greedy sampling over a vocabulary that is split over tp.
#include "portable.h"

IMAGE()

// Written by the engine when it starts: the first token of this rank's slice.
GLOBAL int slice_start = -1;

// The first tokens of the vocabulary have special meanings and are never sampled.
KERNEL(mask_special, float *logits, int rows, int local_vocab) {
  FOR_EACH(row, rows) {
    for (int v = 0; v < local_vocab && slice_start + v < kSpecialTokens; ++v) {
      logits[row * local_vocab + v] = -16777216.0f;
    }
  }
}

// best[row] = (logit, token) of this slice; the lowest token among equals.
KERNEL(slice_argmax, float *best, const float *logits, int rows, int local_vocab, int vocab_start) {
  FOR_EACH(row, rows) {
    int at = 0;
    for (int v = 1; v < local_vocab; ++v) {
      if (logits[row * local_vocab + v] > logits[row * local_vocab + at]) at = v;
    }
    best[2 * row] = logits[row * local_vocab + at];
    best[2 * row + 1] = static_cast<float>(vocab_start + at);
  }
}

// The best of all slices' bests, in the order of the slices.
KERNEL(pick, int *tokens, const float *best, int rows, int slices) {
  FOR_EACH(row, rows) {
    int at = row;
    for (int s = 1; s < slices; ++s) {
      if (best[2 * (s * rows + row)] > best[2 * at]) at = s * rows + row;
    }
    tokens[row] = static_cast<int>(best[2 * at + 1]);
  }
}
