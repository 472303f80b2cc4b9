// SPDX-License-Identifier: Apache-2.0
//
// One source, two machines: NVRTC compiles a kernel file for a GPU, g++ for the software driver.
//
// A kernel strides over its work items, has no barrier, and computes an item in one thread, so any grid and block
// give the same bits.  All values are whole numbers in float (see foundryd/demo/numerics.py): sums are exact in any
// order, and only division and square root round, by the IEEE rule.
#ifndef FOUNDRYD_DEMO_PORTABLE_H
#define FOUNDRYD_DEMO_PORTABLE_H

// A global variable's name is not mangled, so GLOBAL needs no extern "C" for cuModuleGetGlobal to find it.
#ifdef __CUDACC__

#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define GLOBAL __device__
#define DEVICE static __device__ __forceinline__
#define IMAGE()

DEVICE float divide(float a, float b) {
  return __fdiv_rn(a, b);
}
DEVICE float root(float a) {
  return __fsqrt_rn(a);
}
DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
DEVICE float subtract(float a, float b) {
  return __fsub_rn(a, b);
}
DEVICE float round_down(float a) {
  return floorf(a);
}

#else

#include "softcuda/kernel.h"

#define KERNEL(name, ...) SOFTCUDA_KERNEL(name, __VA_ARGS__)
#define GLOBAL SOFTCUDA_GLOBAL
#define DEVICE static inline
#define IMAGE() SOFTCUDA_IMAGE()

DEVICE float divide(float a, float b) {
  return a / b;
}
DEVICE float root(float a) {
  return __builtin_sqrtf(a);
}
DEVICE float multiply(float a, float b) {
  return a * b;
}
DEVICE float subtract(float a, float b) {
  return a - b;
}
// Below 2^24 this is floorf, without the call that baseline x86-64 makes for it.
DEVICE float round_down(float a) {
  const float whole = static_cast<float>(static_cast<int>(a));
  return whole > a ? whole - 1.0f : whole;
}

#endif

constexpr float kActivation = 127.0f;  // bounds, as in numerics.py
constexpr float kExpert = 31.0f;
constexpr float kResidual = 63.0f;
constexpr float kRope = 64.0f;
constexpr int kDecaySteps = 128;
constexpr int kSpecialTokens = 16;
constexpr int kTile = 16;  // outputs of a product that one item computes

DEVICE int tiles(int count) {
  return (count + kTile - 1) / kTile;
}
DEVICE int first_item() {
  return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}
DEVICE int item_stride() {
  return static_cast<int>(gridDim.x * blockDim.x);
}

#define FOR_EACH(item, count) for (int item = first_item(), stride_ = item_stride(); item < (count); item += stride_)

DEVICE float clamp(float x, float bound) {
  return x > bound ? bound : (x < -bound ? -bound : x);
}
DEVICE float nearest(float x) {
  return round_down(x + 0.5f);
}
DEVICE float quantise(float x, float bound) {
  return clamp(nearest(x), bound);
}

// Exact, so the order is free: eight partial sums let a compiler use vector registers.
DEVICE float dot(const float *a, const float *b, int n) {
  float part[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) part[j] += a[i + j] * b[i + j];
  }
  float sum = 0.0f;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (int j = 0; j < 8; ++j) sum += part[j];
  return sum;
}

#endif  // FOUNDRYD_DEMO_PORTABLE_H
