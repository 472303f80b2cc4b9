// SPDX-License-Identifier: Apache-2.0
//
// Room in the calling thread's heap, in large pages, for what the driver takes there.
//
// A driver keeps some 8 KiB of the host's memory for each node of an executable, in small pieces of the heap.  A heap
// grows by as much as each of them needs, so each page of it is a fault.  Here it grows by a large block of which the
// kernel is asked to make large pages (madvise(2), MADV_HUGEPAGE), and the heap has the block back at once.
#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "api.h"

namespace foundryd::bindings {
namespace {

constexpr size_t kPage = size_t{2} << 20;
// glibc maps blocks from a threshold on for themselves, where they are room for nothing else.  The threshold is as
// large as such a block that was given back, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD).
constexpr size_t kThreshold = 16 * kPage - (size_t{64} << 10);
constexpr size_t kBlock = 15 * kPage;  // two are most of a thread's heap, which has 64 MiB
constexpr size_t kPin = 64;
constexpr size_t kFresh = kBlock + (size_t{4} << 10);  // another block fits behind what pins it

struct Free {
  void operator()(void *memory) const { std::free(memory); }
};
using Block = std::unique_ptr<void, Free>;

Block allocate(size_t bytes) {
  return Block(std::malloc(bytes));
}

uintptr_t address(const Block &block) {
  return reinterpret_cast<uintptr_t>(block.get());
}

// Not so where the threshold was set (mallopt(3)), nor in other libraries' heaps: glibc needs 16 bytes of a block that
// is mapped for itself, and 8 of others, whose sizes with these are multiples of 16.
bool in_heap(const Block &block) {
  return malloc_usable_size(block.get()) % 16 == 8;
}

class HeapRoom {
 public:
  HeapRoom() {
    const Block largest = allocate(kThreshold);
    // Or a compiler may leave both calls out.
    if (largest != nullptr) *static_cast<volatile char *>(largest.get()) = 0;
  }

  // Nobody has `bytes` of the heap then that are to be large pages, and a block more: once the last of it is taken, the
  // heap grows by what is asked for, and what it has then at its end keeps glibc from giving it another 64 MiB.
  void make(size_t bytes) {
    // All at once, or each would be the one before, and with no allocation in between, which would be at the heap's
    // end.
    const size_t count = (bytes + kBlock - 1) / kBlock + 1;
    std::vector<Block> known, fresh;
    known.reserve(count);
    fresh.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      Block block = allocate(kBlock);
      const bool is_new = block != nullptr && in_heap(block) && !has(address(block));
      if (is_new) {
        block.reset();
        block = allocate(kFresh);
      }
      if (block == nullptr) break;  // who needs memory will say that there is none
      (is_new ? fresh : known).push_back(std::move(block));
    }
    for (const Block &block : fresh) note(block);
    if (!fresh.empty()) pin(std::move(fresh.front()));
  }

 private:
  bool has(uintptr_t first) const {
    return std::any_of(ranges_.begin(), ranges_.end(),
                       [=](const Range &r) { return r.first <= first && first + kBlock <= r.end; });
  }

  void note(const Block &block) {
    const Range range{address(block), address(block) + kFresh};
    const uintptr_t first = (range.first + kPage - 1) / kPage * kPage, end = range.end / kPage * kPage;
    // Where the system has no large pages, small ones are as good as they were.
    madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
    if (!ranges_.empty() && range.first - ranges_.back().end <= kPin)
      ranges_.back().end = range.end;
    else
      ranges_.push_back(range);
  }

  // The heap has the rest of a block that becomes shorter, and cannot give the system back what lies before its end.
  void pin(Block block) {
    if (void *const kept = std::realloc(block.get(), kPin)) {
      static_cast<void>(block.release());
      pins_.emplace_back(kept);
    }
  }

  struct Range {
    uintptr_t first, end;
  };
  std::vector<Range> ranges_;
  std::vector<Block> pins_;
};

}  // namespace

void define_heap(py::module_ &m) {
  py::class_<HeapRoom>(m, "HeapRoom", "Room in the calling thread's heap, in large pages, until this object goes.")
      .def(py::init<>())
      .def("make", &HeapRoom::make, py::arg("bytes"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace foundryd::bindings
