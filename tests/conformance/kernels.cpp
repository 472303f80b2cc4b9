// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the conformance script, for either driver: g++ makes a software-driver image of this file, NVRTC or
// nvcc a cubin.
#ifdef __CUDACC__
#define SOFTCUDA_KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#define SOFTCUDA_GLOBAL extern "C" __device__
#define SOFTCUDA_IMAGE()
#else
#include <ctime>

#include "softcuda/kernel.h"
#endif

SOFTCUDA_GLOBAL unsigned conformance_counter = 7;
SOFTCUDA_GLOBAL unsigned conformance_table[16] = {1, 2, 3};

// Strided over the whole launch, whatever its shape.
SOFTCUDA_KERNEL(add_value, unsigned *x, unsigned value, unsigned n) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] += value;
}

SOFTCUDA_KERNEL(scale_value, unsigned *x, unsigned value, unsigned n) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] *= value;
}

// One thread does it, so that the order of launches shows in the result.
SOFTCUDA_KERNEL(append_digit, unsigned long long *number, unsigned digit) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *number = *number * 10 + digit;
}

SOFTCUDA_KERNEL(bump_counter, unsigned *out) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *out = ++conformance_counter;
}

SOFTCUDA_KERNEL(no_parameters, void) {
  if (blockIdx.x == 0 && threadIdx.x == 0) conformance_table[15] += 1;
}

// Padding between parameters and inside one of them.
struct Mixed {
  unsigned char tag;
  unsigned long long wide;
  unsigned short small;
};

SOFTCUDA_KERNEL(mixed_parameters, unsigned char a, unsigned long long *out, Mixed m, unsigned short b, double c) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *out = a + m.tag + m.wide + m.small + b + (unsigned long long)c;
}

struct Block4096 {
  unsigned long long words[512];
};

SOFTCUDA_KERNEL(large_parameter, unsigned long long *out, Block4096 block) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *out = block.words[0] + block.words[3];
}

// What one block can tell of the launch: the shape of its cluster, blocks and threads along x, dynamic shared memory.
SOFTCUDA_KERNEL(tell_launch, unsigned *out) {
  if (blockIdx.x != 0 || blockIdx.y != 0 || threadIdx.x != 0) return;
#ifdef __CUDACC__
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(out[0]));
  asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(out[1]));
  asm("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(out[2]));
#else
  out[0] = out[1] = out[2] = 1;
#endif
  out[3] = gridDim.x;
  out[4] = blockDim.x;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(out[5]));
#else
  const softcuda::Launch &launch = softcuda::launch();
  out[0] = launch.cluster.x;
  out[1] = launch.cluster.y;
  out[2] = launch.cluster.z;
  out[3] = launch.grid.x;
  out[4] = launch.block.x;
  out[5] = launch.shared_bytes;
#endif
}

// Takes a while, so that the host can see work in flight.  Bounded.
SOFTCUDA_KERNEL(take_time, unsigned milliseconds) {
#ifdef __CUDACC__
  const unsigned long long step = 1000000;
  for (unsigned i = 0; i < milliseconds; ++i) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
      __nanosleep(1000);
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < step);
  }
#else
  if (blockIdx.x != 0) return;
  timespec time{static_cast<time_t>(milliseconds / 1000), static_cast<long>(milliseconds % 1000) * 1000000};
  nanosleep(&time, nullptr);
#endif
}

SOFTCUDA_IMAGE()
