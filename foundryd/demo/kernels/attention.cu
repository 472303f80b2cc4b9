// SPDX-License-Identifier: Apache-2.0
//
// Rotary positions and attention over a KV cache of [request][position][kv head][dim].
#include "portable.h"

IMAGE()

// Sine of a number of turns in [0, 2), each operation rounded on its own as NumPy does.
DEVICE float sine(float turns) {
  const float quarters = turns * 4.0f;
  const float quadrant = round_down(quarters);
  const int index = static_cast<int>(quadrant) % 4;
  float part = quarters - quadrant;
  if (index % 2 == 1) part = 1.0f - part;
  const float square = multiply(part, part);
  float value = subtract(0.07969262f, multiply(square, 0.00468175f));
  value = subtract(0.64596409f, multiply(square, value));
  value = subtract(1.57079632f, multiply(square, value));
  value = multiply(part, value);
  return index >= 2 ? -value : value;
}

// Runs once, outside every graph: table[position][pair] = (cosine, sine).
KERNEL(rope_table, float *table, int positions, int half) {
  FOR_EACH(item, positions * half) {
    const int position = item / half;
    const int pair = item % half;
    const int wavelength = 1 << (3 + pair * 8 / half);
    const float turns = static_cast<float>(position % wavelength) / static_cast<float>(wavelength);
    table[2 * item] = quantise(sine(turns + 0.25f) * kRope, kRope);
    table[2 * item + 1] = quantise(sine(turns) * kRope, kRope);
  }
}

// Rotates queries and keys in place and appends keys and values to the cache.  A row of qkv is heads queries, then
// kv_heads keys, then kv_heads values.
KERNEL(rope_append, float *qkv, float *keys, float *values, const float *table, const int *positions, int rows,
       int heads, int kv_heads, int dim, int max_seq) {
  const int parts = heads + 2 * kv_heads;
  FOR_EACH(item, rows * parts) {
    const int row = item / parts;
    const int part = item % parts;
    const int position = positions[row];
    float *x = qkv + item * dim;
    if (part < heads + kv_heads) {
      for (int pair = 0; pair < dim / 2; ++pair) {
        const float c = table[(position * (dim / 2) + pair) * 2];
        const float s = table[(position * (dim / 2) + pair) * 2 + 1];
        const float even = x[2 * pair];
        const float odd = x[2 * pair + 1];
        x[2 * pair] = quantise((even * c - odd * s) / kRope, kActivation);
        x[2 * pair + 1] = quantise((even * s + odd * c) / kRope, kActivation);
      }
    }
    if (part >= heads) {
      float *cache = part < heads + kv_heads ? keys : values;
      const int head = (part - heads) % kv_heads;
      float *to = cache + ((static_cast<long long>(row) * max_seq + position) * kv_heads + head) * dim;
      for (int i = 0; i < dim; ++i) to[i] = x[i];
    }
  }
}

// One by-value struct, as large attention libraries have it.  Nobody reads the three pointers below `positions`
// here: they belong to features that this engine never uses, and hold whatever the host left in them.
struct AttentionParams {
  float *out;
  const float *qkv;
  const float *keys;
  const float *values;
  const float *decay;
  const int *positions;
  const void *page_table;
  const void *slopes;
  void *semaphore;
  int rows;
  int heads;
  int kv_heads;
  int dim;
  int max_seq;
  float scale;
};

KERNEL(attend, AttentionParams p) {
  const int row_width = (p.heads + 2 * p.kv_heads) * p.dim;
  const int step = p.kv_heads * p.dim;
  FOR_EACH(item, p.rows * p.heads) {
    const int row = item / p.heads;
    const int head = item % p.heads;
    const int count = p.positions[row] + 1;
    const float *query = p.qkv + row * row_width + head * p.dim;
    const long long first = static_cast<long long>(row) * p.max_seq * step + head / (p.heads / p.kv_heads) * p.dim;
    float highest = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float score = nearest(dot(query, p.keys + first + static_cast<long long>(i) * step, p.dim) * p.scale);
      if (i == 0 || score > highest) highest = score;
    }
    float sum[256] = {};
    float total = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float score = nearest(dot(query, p.keys + first + static_cast<long long>(i) * step, p.dim) * p.scale);
      const float below = highest - score;
      const float share = p.decay[below < kDecaySteps - 1 ? static_cast<int>(below) : kDecaySteps - 1];
      total += share;
      for (int j = 0; j < p.dim; ++j) sum[j] += share * p.values[first + static_cast<long long>(i) * step + j];
    }
    for (int j = 0; j < p.dim; ++j) p.out[item * p.dim + j] = quantise(divide(sum[j], total), kActivation);
  }
}
