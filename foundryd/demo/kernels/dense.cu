// SPDX-License-Identifier: Apache-2.0
//
// Norm, products and the residual stream.  Matrices are [outputs][inputs].
#include "portable.h"

IMAGE()

KERNEL(rms_norm, float *out, const float *x, const float *gain, int rows, int width) {
  FOR_EACH(row, rows) {
    const float *in = x + row * width;
    const float mean = divide(dot(in, in, width), static_cast<float>(width));
    const float rms = root(mean + 0.0625f);
    for (int i = 0; i < width; ++i) out[row * width + i] = quantise(divide(in[i] * gain[i], rms), kActivation);
  }
}

// A finished product: scaled and rounded to activations.
KERNEL(project, float *out, const float *x, const float *matrix, int rows, int outputs, int inputs, float scale) {
  FOR_EACH(item, rows * tiles(outputs)) {
    const int row = item / tiles(outputs);
    const int first = item % tiles(outputs) * kTile;
    for (int o = first; o < first + kTile && o < outputs; ++o) {
      out[row * outputs + o] = quantise(dot(x + row * inputs, matrix + o * inputs, inputs) * scale, kActivation);
    }
  }
}

// A rank's part of a product, not to be rounded before the parts are added.
KERNEL(project_part, float *out, const float *x, const float *matrix, int rows, int outputs, int inputs) {
  FOR_EACH(item, rows * tiles(outputs)) {
    const int row = item / tiles(outputs);
    const int first = item % tiles(outputs) * kTile;
    for (int o = first; o < first + kTile && o < outputs; ++o) {
      out[row * outputs + o] = dot(x + row * inputs, matrix + o * inputs, inputs);
    }
  }
}

KERNEL(add_residual, float *x, const float *sum, int count, float scale) {
  FOR_EACH(i, count) x[i] = clamp(x[i] + nearest(sum[i] * scale), kResidual);
}
