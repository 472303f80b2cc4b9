// SPDX-License-Identifier: Apache-2.0
//
// The "physical" memory of the devices: extents of one sparse memfd in each process, so that any of them can be mapped
// several times, and mapped by another process, without a descriptor for each.
#ifndef SOFTCUDA_HEAP_H
#define SOFTCUDA_HEAP_H

#include <cstdint>
#include <memory>

#include "failure.h"

namespace softcuda {

inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kGranule = uint64_t{2} << 20;  // what cuMemCreate and address reservations are made of

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// A piece of device memory.  Lives as long as a handle or a mapping refers to it.
class Extent {
 public:
  // Takes it from this process's heap.  Fresh memory is poisoned: the first 128 KiB and the last 4 KiB of each 2 MiB
  // (all of it with SOFTCUDA_POISON_WHOLE=1), which keeps a large, sparsely used allocation cheap.
  Extent(CUdevice device, uint64_t bytes, bool shareable);
  // Belongs to another process: `file` is that process's heap.
  Extent(int file, uint64_t offset, uint64_t bytes, CUdevice device);
  ~Extent();
  Extent(const Extent &) = delete;
  Extent &operator=(const Extent &) = delete;

  CUdevice device() const { return device_; }
  uint64_t bytes() const { return bytes_; }
  bool shareable() const { return shareable_; }
  int file() const { return file_; }
  uint64_t offset() const { return offset_; }

  // Maps it at a fixed address, over whatever is there.
  void map(uint64_t address, uint64_t bytes, int protection) const;
  // A descriptor that another process can import.  It carries the place of the extent as its file offset.
  int export_descriptor() const;
  // Reads such a descriptor.
  static std::shared_ptr<Extent> import_descriptor(int descriptor);

 private:
  int file_;
  uint64_t offset_;
  uint64_t bytes_;
  CUdevice device_;
  bool shareable_;
  bool foreign_;
};

// The heap's descriptor, for legacy IPC handles.
int heap_file();

// Finds room for `bytes` at an arbitrary place below the fixed ranges that programs reserve, and keeps it with an
// inaccessible mapping.
uint64_t place_anywhere(uint64_t bytes, uint64_t alignment);
// The same at a given place; false if it is taken.
bool place_at(uint64_t address, uint64_t bytes);
// Makes a range inaccessible again without giving it up, or gives it up.
void blank(uint64_t address, uint64_t bytes);
void give_up(uint64_t address, uint64_t bytes);

}  // namespace softcuda

#endif  // SOFTCUDA_HEAP_H
