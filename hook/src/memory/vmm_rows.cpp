// SPDX-License-Identifier: Apache-2.0
//
// Overrides: virtual memory that an engine manages itself.  Its reservations are the hook's; handles, mappings and
// access are the driver's affair, and what is mapped is recorded as an allocation.
#include "interpose/concepts.h"
#include "memory/rows.h"
#include "support/log.h"

using namespace foundryd;
using namespace foundryd::memory;

namespace {

// What the driver has to say about `real` inside a reservation of the arenas'; after a success, `note`.
template <class Real, class Note>
CUresult in_reserved_space(CUdeviceptr address, size_t bytes, Real &&real, Note &&note) {
  Arenas &arenas = Arenas::instance();
  if (arenas.contains(address)) return CUDA_ERROR_INVALID_VALUE;  // to the program, that is plain memory
  if (!arenas.reservable(address)) return real();
  std::lock_guard guard(arenas.reserved_space());
  if (!arenas.keeps_space_around(address)) return real();
  // To the program, what it has not reserved is as if it were not there; to the driver, all of it is one reservation.
  const auto around = arenas.reservation(address);
  if (!around || bytes > around->end() - address) return CUDA_ERROR_INVALID_VALUE;
  const CUresult result = real();
  if (result == CUDA_SUCCESS) note(arenas);
  return result;
}

}  // namespace

FDY_OVERRIDE CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment,
                                                  CUdeviceptr wish, unsigned long long flags) {
  const auto real = [&](CUdeviceptr at) { return FDY_NEXT(cuMemAddressReserve, address, bytes, alignment, at, flags); };
  if (!overriding()) return real(wish);
  FDY_OWNER_OF_CALL();
  return guard_driver([&] {
    const bool valid = address && bytes && bytes % kGranule == 0 && (alignment & (alignment - 1)) == 0 &&
                       wish % kGranule == 0 && flags == 0;
    Arenas &arenas = Arenas::instance();
    // The driver says what is wrong with the rest.
    if (!valid || !arenas.serves_reservations()) return real(wish);
    if (wish && !arenas.contains(wish) && !arenas.reservable(wish)) {
      // An address that the engine knows by itself is the same in every process.
      const Reservation made = reserve_exactly({wish, bytes}, alignment);
      if (made.result != CUDA_SUCCESS) return made.result;
      *address = made.address;
      if (made.address == wish) return CUDA_SUCCESS;
    }
    std::lock_guard guard(arenas.reserved_space());
    try {
      *address = arenas.reserve(selected_arena(), bytes, alignment);
      return CUDA_SUCCESS;
    } catch (const Error &error) {
      warn("%s", error.what());
      if (capturing()) throw;
      return real(0);  // what is mapped there will be missing from the recorded sequence: divergence() tells
    }
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  const auto real = [&] { return FDY_NEXT(cuMemAddressFree, address, bytes); };
  if (!overriding()) return real();
  return guard_driver([&] {
    Arenas &arenas = Arenas::instance();
    if (arenas.contains(address)) return CUDA_ERROR_INVALID_VALUE;
    if (!arenas.keeps_space_around(address)) return real();
    std::lock_guard guard(arenas.reserved_space());
    return arenas.unreserve(address, bytes);
  });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                                       CUmemGenericAllocationHandle memory, unsigned long long flags) {
  const auto real = [&] { return FDY_NEXT(cuMemMap, address, bytes, offset, memory, flags); };
  if (!overriding()) return real();
  return guard_driver(
      [&] { return in_reserved_space(address, bytes, real, [&](Arenas &arenas) { arenas.mapped(address, bytes); }); });
}

FDY_OVERRIDE CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t bytes) {
  const auto real = [&] { return FDY_NEXT(cuMemUnmap, address, bytes); };
  if (!overriding()) return real();
  return guard_driver([&] {
    return in_reserved_space(address, bytes, real, [&](Arenas &arenas) { arenas.unmapped(address, bytes); });
  });
}

namespace foundryd::memory {

std::span<const Row> vmm_rows() {
  static const Row table[] = {
      FDY_ROW("cuMemAddressReserve", cuMemAddressReserve, 10020),
      FDY_ROW("cuMemAddressFree", cuMemAddressFree, 10020),
      FDY_ROW("cuMemMap", cuMemMap, 10020),
      FDY_ROW("cuMemUnmap", cuMemUnmap, 10020),
  };
  return table;
}

}  // namespace foundryd::memory
