// SPDX-License-Identifier: Apache-2.0
#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "half.h"

namespace ncclstub::soft {
namespace {

// How a type is stored (Wire) and in what it is computed (Sum).
template <class Wire>
struct Element {
  using Sum = std::conditional_t<std::is_floating_point_v<Wire>, Wire,
                                 std::conditional_t<std::is_signed_v<Wire>, int64_t, uint64_t>>;
  static Sum load(Wire value) { return static_cast<Sum>(value); }
  static Wire store(Sum value) { return static_cast<Wire>(value); }
};

template <>
struct Element<Float16> {
  using Sum = float;
  static float load(Float16 value) { return widen(value); }
  static Float16 store(float value) { return narrow_float16(value); }
};

template <>
struct Element<Bfloat16> {
  using Sum = float;
  static float load(Bfloat16 value) { return widen(value); }
  static Bfloat16 store(float value) { return narrow_bfloat16(value); }
};

// Signed overflow wraps, as it does on a GPU.
template <class Sum, class Operator>
Sum wrapping(Sum a, Sum b, Operator apply) {
  if constexpr (std::is_integral_v<Sum>) {
    return static_cast<Sum>(apply(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  } else {
    return apply(a, b);
  }
}

// The inputs lie at any offset that a type's alignment allows, and so does `out`; memcpy of one element is a load.
template <class Wire>
Wire read(const std::byte *from, uint64_t index) {
  Wire value;
  std::memcpy(&value, from + index * sizeof(Wire), sizeof value);
  return value;
}

template <class Wire>
void write(std::byte *to, uint64_t index, Wire value) {
  std::memcpy(to + index * sizeof(Wire), &value, sizeof value);
}

template <class Wire, class Combine>
void fold(std::byte *out, const std::vector<const std::byte *> &inputs, uint64_t count, bool average, Combine combine) {
  using E = Element<Wire>;
  using Sum = typename E::Sum;
  constexpr uint64_t kBlock = 512;
  Sum sums[kBlock];
  for (uint64_t first = 0; first < count; first += kBlock) {
    const uint64_t length = std::min(kBlock, count - first);
    for (uint64_t i = 0; i < length; ++i) sums[i] = E::load(read<Wire>(inputs[0], first + i));
    for (size_t r = 1; r < inputs.size(); ++r) {
      for (uint64_t i = 0; i < length; ++i) sums[i] = combine(sums[i], E::load(read<Wire>(inputs[r], first + i)));
    }
    if (average) {
      for (uint64_t i = 0; i < length; ++i) sums[i] /= static_cast<Sum>(inputs.size());
    }
    for (uint64_t i = 0; i < length; ++i) write<Wire>(out, first + i, E::store(sums[i]));
  }
}

template <class Wire>
void reduce_type(uint32_t reduction, std::byte *out, const std::vector<const std::byte *> &inputs, uint64_t count) {
  using Sum = typename Element<Wire>::Sum;
  switch (reduction) {
    case ncclProd:
      return fold<Wire>(out, inputs, count, false,
                        [](Sum a, Sum b) { return wrapping(a, b, [](auto x, auto y) { return x * y; }); });
    case ncclMax:
      return fold<Wire>(out, inputs, count, false, [](Sum a, Sum b) { return a < b ? b : a; });
    case ncclMin:
      return fold<Wire>(out, inputs, count, false, [](Sum a, Sum b) { return b < a ? b : a; });
    default:  // sum, average, and sums of inputs that were scaled when they were staged
      return fold<Wire>(out, inputs, count, reduction == ncclAvg,
                        [](Sum a, Sum b) { return wrapping(a, b, [](auto x, auto y) { return x + y; }); });
  }
}

template <class Wire>
void scale_type(uint64_t scalar, std::byte *out, const std::byte *in, uint64_t count) {
  using E = Element<Wire>;
  using Sum = typename E::Sum;
  const Sum factor = E::load(read<Wire>(reinterpret_cast<const std::byte *>(&scalar), 0));
  for (uint64_t i = 0; i < count; ++i) {
    const Sum value = E::load(read<Wire>(in, i));
    write<Wire>(out, i, E::store(wrapping(value, factor, [](auto x, auto y) { return x * y; })));
  }
}

// Calls `apply` with a value of the type that a data type is stored in.
template <class Apply>
void dispatch(ncclDataType_t type, Apply apply) {
  switch (type) {
    case ncclInt8:
      return apply(int8_t{});
    case ncclUint8:
      return apply(uint8_t{});
    case ncclInt32:
      return apply(int32_t{});
    case ncclUint32:
      return apply(uint32_t{});
    case ncclInt64:
      return apply(int64_t{});
    case ncclUint64:
      return apply(uint64_t{});
    case ncclFloat16:
      return apply(Float16{});
    case ncclFloat32:
      return apply(float{});
    case ncclFloat64:
      return apply(double{});
    case ncclBfloat16:
      return apply(Bfloat16{});
    default:
      return;  // refused when the collective was called
  }
}

}  // namespace

void reduce(ncclDataType_t type, uint32_t reduction, std::byte *out, const std::vector<const std::byte *> &inputs,
            uint64_t count) {
  dispatch(type, [&](auto wire) { reduce_type<decltype(wire)>(reduction, out, inputs, count); });
}

void scale(ncclDataType_t type, uint64_t scalar, std::byte *out, const std::byte *in, uint64_t count) {
  dispatch(type, [&](auto wire) { scale_type<decltype(wire)>(scalar, out, in, count); });
}

}  // namespace ncclstub::soft
