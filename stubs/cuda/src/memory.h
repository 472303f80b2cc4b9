// SPDX-License-Identifier: Apache-2.0
//
// Every range of addresses that the driver knows: what a pointer is, and whether a copy may touch it.
#ifndef SOFTCUDA_MEMORY_H
#define SOFTCUDA_MEMORY_H

#include <map>
#include <memory>
#include <vector>

#include "heap.h"
#include "process.h"

namespace softcuda {

enum class Kind {
  Plain,       // cuMemAlloc
  Pool,        // cuMemAllocAsync, graph allocations
  Mapped,      // cuMemMap
  HostAlloc,   // cuMemAllocHost, cuMemHostAlloc
  Registered,  // cuMemHostRegister
  Global,      // a variable of a module
  Imported     // cuIpcOpenMemHandle
};

struct Range {
  uint64_t base = 0;
  uint64_t bytes = 0;  // as the program asked for
  Kind kind = Kind::Plain;
  CUdevice device = 0;
  std::weak_ptr<Context> context;
  uint64_t buffer_id = 0;
  unsigned host_flags = 0;
  std::shared_ptr<Extent> extent;
  uint64_t mapping = 0;  // the pages that hold it
  uint64_t mapping_bytes = 0;
  CUmemGenericAllocationHandle handle = 0;  // of a Mapped range
  CUmemAccess_flags access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  bool sync_memops = false;
  std::shared_ptr<MemPool> pool;

  bool host() const { return kind == Kind::HostAlloc || kind == Kind::Registered; }
};

// Ranges do not overlap.
class Ranges {
 public:
  Range &add(Range range);
  // The range that contains an address; null if none does.
  Range *find(uint64_t address);
  Range *starting_at(uint64_t address);
  bool overlaps(uint64_t address, uint64_t bytes) const;
  void remove(uint64_t base) { ranges_.erase(base); }
  std::vector<Range> of(const Context &context) const;
  // Whether all of [address, address + bytes) is memory that the driver knows and lets a copy read or write.
  bool covers(uint64_t address, uint64_t bytes, bool write);

 private:
  std::map<uint64_t, Range> ranges_;
};

// Guarded by the process lock.
Ranges &ranges();

// A device allocation with a place of its own.  Given up with the last reference.
struct Allocation {
  Allocation(CUdevice device, uint64_t bytes);
  ~Allocation();
  Allocation(const Allocation &) = delete;
  Allocation &operator=(const Allocation &) = delete;

  uint64_t address = 0;
  uint64_t bytes = 0;
  CUdevice device = 0;
  uint64_t mapping = 0;
  uint64_t mapping_bytes = 0;
  std::shared_ptr<Extent> extent;

  Range range(Kind kind, const std::shared_ptr<Context> &context) const;
};

// Accounts device memory; fails with out of memory.
void charge(CUdevice device, uint64_t bytes);
void discharge(CUdevice device, uint64_t bytes);

// Allocations of cuMemAlloc and pools by address, guarded by the process lock.
std::map<uint64_t, std::shared_ptr<Allocation>> &allocations();
CUdeviceptr allocate(CUdevice device, uint64_t bytes, Kind kind, const std::shared_ptr<Context> &context);
void deallocate(uint64_t address);

// Lets go of what a context that ends had allocated, device and pinned memory, and of what it registered.
void release_memory(const Context &context);

}  // namespace softcuda

#endif  // SOFTCUDA_MEMORY_H
