// SPDX-License-Identifier: Apache-2.0
//
// How a kernel for the software driver is written.  An image is a shared object whose kernels are host functions,
// one call a block, wrapped in a genuine fat-binary container (see softcuda_add_image in stubs/cuda/cmake).
//
//   SOFTCUDA_KERNEL(scale, float *x, float factor, int n) {
//     for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] *= factor;
//   }
//
// A block runs as a single thread: threadIdx is 0 and blockDim is 1, whatever the launch asked for, so a kernel
// strides over its work and has no barrier inside.  `softcuda::launch()` gives the launch as it was asked for.
#ifndef SOFTCUDA_KERNEL_H
#define SOFTCUDA_KERNEL_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace softcuda {

struct Dim3 {
  unsigned x, y, z;
};

struct Launch {
  Dim3 grid;
  Dim3 block;
  Dim3 index;  // of this block
  uint32_t shared_bytes;
  void *shared;  // dynamic shared memory of this block, poisoned
  Dim3 cluster;  // last, so that images from before it was there go on working
};

// Whether the body came to its end: one that throws fails the launch.  No exception leaves the image, which has a C++
// runtime of its own.
using Invoke = bool (*)(const Launch &, void *const *params) noexcept;

struct KernelEntry {
  const char *name;
  Invoke invoke;
  uint32_t param_count;
  const uint32_t *param_offsets;  // in the packed parameter block
  const uint32_t *param_sizes;
  uint32_t param_bytes;  // size of the packed parameter block
};

// What an image exports under the name `softcuda_image_table`.
struct ImageTable {
  uint32_t abi;
  const KernelEntry *const *begin;
  const KernelEntry *const *end;
};

inline constexpr uint32_t kImageAbi = 2;

namespace detail {

inline thread_local const Launch *current = nullptr;

template <class... A>
struct Layout {
  static constexpr size_t count = sizeof...(A);
  static constexpr std::array<uint32_t, count + 1> sizes{static_cast<uint32_t>(sizeof(A))..., 0};
  static constexpr std::array<uint32_t, count + 1> aligns{static_cast<uint32_t>(alignof(A))..., 1};
  static constexpr std::array<uint32_t, count + 1> offsets = [] {
    std::array<uint32_t, count + 1> out{};
    uint32_t at = 0;
    for (size_t i = 0; i < count; ++i) {
      at = (at + aligns[i] - 1) / aligns[i] * aligns[i];
      out[i] = at;
      at += sizes[i];
    }
    out[count] = at;
    return out;
  }();
};

template <auto Body>
struct Kernel;

template <class... A, void (*Body)(A...)>
struct Kernel<Body> {
  template <size_t... I>
  static void call(void *const *params, std::index_sequence<I...>) {
    Body(*static_cast<A *>(params[I])...);
  }
  static bool invoke(const Launch &launch, void *const *params) noexcept {
    current = &launch;
    bool ended = true;
#ifdef __cpp_exceptions
    try {
      call(params, std::index_sequence_for<A...>{});
    } catch (...) {
      ended = false;
    }
#else
    call(params, std::index_sequence_for<A...>{});
#endif
    current = nullptr;
    return ended;
  }
  static constexpr KernelEntry entry(const char *name) {
    using L = Layout<A...>;
    return {name, &invoke, static_cast<uint32_t>(L::count), L::offsets.data(), L::sizes.data(), L::offsets[L::count]};
  }
};

}  // namespace detail

inline const Launch &launch() {
  return *detail::current;
}

}  // namespace softcuda

#define blockIdx (softcuda::launch().index)
#define gridDim (softcuda::launch().grid)
#define threadIdx (softcuda::Dim3{0, 0, 0})
#define blockDim (softcuda::Dim3{1, 1, 1})

#define SOFTCUDA_KERNEL(name, ...)                                                                              \
  static void name(__VA_ARGS__);                                                                                \
  namespace softcuda_entries {                                                                                  \
  static constexpr softcuda::KernelEntry name##_entry = softcuda::detail::Kernel<&::name>::entry(#name);        \
  __attribute__((used, section("softcuda_kernels"))) static const softcuda::KernelEntry *const name##_pointer = \
      &name##_entry;                                                                                            \
  }                                                                                                             \
  static void name(__VA_ARGS__)

// A device global, outside any namespace: visible to cuModuleGetGlobal under its own name.
#define SOFTCUDA_GLOBAL __attribute__((visibility("default"), used))

// Once in each image.
#define SOFTCUDA_IMAGE()                                                                                      \
  extern "C" {                                                                                                \
  extern const softcuda::KernelEntry *const __start_softcuda_kernels[] __attribute__((visibility("hidden"))); \
  extern const softcuda::KernelEntry *const __stop_softcuda_kernels[] __attribute__((visibility("hidden")));  \
  __attribute__((visibility("default"))) extern const softcuda::ImageTable softcuda_image_table;              \
  __attribute__((used)) const softcuda::ImageTable softcuda_image_table = {                                   \
      softcuda::kImageAbi, __start_softcuda_kernels, __stop_softcuda_kernels};                                \
  }

#endif  // SOFTCUDA_KERNEL_H
