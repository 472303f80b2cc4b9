// SPDX-License-Identifier: Apache-2.0
//
// What the software device says of itself.
#ifndef SOFTCUDA_DEVICE_H
#define SOFTCUDA_DEVICE_H

namespace softcuda {

inline constexpr int kMaxThreadsPerBlock = 1024;
inline constexpr int kThreadsPerMultiprocessor = 2048;
inline constexpr int kBlocksPerMultiprocessor = 32;
inline constexpr int kMultiprocessors = 132;
inline constexpr int kSharedPerBlock = 48 << 10;
inline constexpr int kSharedPerBlockOptin = 227 << 10;
inline constexpr int kSharedPerMultiprocessor = 228 << 10;

}  // namespace softcuda

#endif  // SOFTCUDA_DEVICE_H
