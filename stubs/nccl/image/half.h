// SPDX-License-Identifier: Apache-2.0
//
// float16 and bfloat16 as bits.  Rounding is to nearest, ties to even.
#ifndef NCCLSTUB_IMAGE_HALF_H
#define NCCLSTUB_IMAGE_HALF_H

#include <bit>
#include <cstdint>

namespace ncclstub::soft {

struct Float16 {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

inline float widen(Bfloat16 value) {
  return std::bit_cast<float>(uint32_t{value.bits} << 16);
}

inline Bfloat16 narrow_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(bits >> 16 | 0x40)};  // a quiet NaN
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float widen(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t exponent = value.bits >> 10 & 0x1f;
  const uint32_t fraction = value.bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

inline Float16 narrow_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  const auto make = [sign](uint32_t rest) { return Float16{static_cast<uint16_t>(sign | rest)}; };
  if (magnitude > 0x7f800000) return make(0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return make(0x7c00);  // from 65520 on it rounds to infinity
  if (magnitude >= 0x38800000) {                     // normal
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return make((rounded - 0x38000000) >> 13);
  }
  // Subnormal: adding half a unit of 2^-24 in float32 rounds at the right bit.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return make(std::bit_cast<uint32_t>(shifted) - 0x3f000000);
}

}  // namespace ncclstub::soft

#endif  // NCCLSTUB_IMAGE_HALF_H
