// SPDX-License-Identifier: Apache-2.0
//
// The kernels of a decoder by the shape of their parameters only: pointers, numbers and a struct passed by value, as
// tests/benchmarks/synthetic.py describes them.  What is measured is how graphs of them are built; none computes.
#include <cstddef>
#include <cstdint>

#include "softcuda/kernel.h"

// Some parameters hold its address.
SOFTCUDA_GLOBAL uint32_t scales[64];

using P = void *;
using I = uint32_t;

template <size_t Bytes>
struct S {
  uint64_t words[Bytes / 8];
};

SOFTCUDA_KERNEL(norm_in, P, P, P, P, I, I, I, I, S<64>) {}
SOFTCUDA_KERNEL(qkv_gemm, P, P, P, P, P, I, I, I, I, I, I, I, I, S<640>) {}
SOFTCUDA_KERNEL(rope, P, P, P, P, P, P, I, I, I, I, I, I, S<64>) {}
SOFTCUDA_KERNEL(kv_write, P, P, P, P, P, P, I, I, I, I, I, I, I, I, S<96>) {}
SOFTCUDA_KERNEL(attention, P, P, P, P, P, P, P, P, I, I, I, I, I, I, I, I, I, I, I, I, S<512>) {}
SOFTCUDA_KERNEL(attention_merge, P, P, P, P, I, I, I, I, I, I, S<64>) {}
SOFTCUDA_KERNEL(out_gemm, P, P, P, P, P, I, I, I, I, I, I, I, I, S<640>) {}
SOFTCUDA_KERNEL(norm_post, P, P, P, P, I, I, I, I, S<64>) {}
SOFTCUDA_KERNEL(router, P, P, P, P, I, I, I, I, I, I, S<128>) {}
SOFTCUDA_KERNEL(top_k, P, P, P, P, P, P, I, I, I, I, S<64>) {}
SOFTCUDA_KERNEL(permute, P, P, P, P, P, P, I, I, I, I, I, I, S<128>) {}
SOFTCUDA_KERNEL(up_gemm, P, P, P, P, P, P, I, I, I, I, I, I, I, I, S<832>) {}
SOFTCUDA_KERNEL(activate, P, P, P, P, I, I, I, I, S<64>) {}
SOFTCUDA_KERNEL(down_gemm, P, P, P, P, P, P, I, I, I, I, I, I, I, I, S<832>) {}
SOFTCUDA_KERNEL(combine, P, P, P, P, P, P, I, I, I, I, I, I, S<96>) {}
SOFTCUDA_KERNEL(add, P, P, P, P, I, I, I, I, S<64>) {}
SOFTCUDA_KERNEL(exchange, P, P, I, I, S<4096>) {}
SOFTCUDA_KERNEL(quantize, P, P, P, P, I, I, I, I, S<128>) {}
SOFTCUDA_KERNEL(shared_up, P, P, P, P, P, P, I, I, I, I, I, I, I, I, S<448>) {}
SOFTCUDA_KERNEL(sample, P, P, P, P, P, P, I, I, I, I, I, I, S<256>) {}

SOFTCUDA_IMAGE()
