// SPDX-License-Identifier: Apache-2.0
#include "heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "process.h"
#include "random.h"

namespace softcuda {

namespace {

constexpr uint64_t kTrailerMagic = 0x746e657478654353u;
constexpr uint64_t kPoisonedHead = uint64_t{128} << 10;

// Behind every shareable extent: how an importer knows what it got.
struct Trailer {
  uint64_t magic;
  uint64_t offset;
  uint64_t bytes;
  int32_t device;
  int32_t reserved;
};

void write_all(int file, const void *data, size_t bytes, uint64_t offset) {
  const auto *from = static_cast<const std::byte *>(data);
  while (bytes > 0) {
    const ssize_t n = pwrite(file, from, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    require(n > 0, CUDA_ERROR_OUT_OF_MEMORY);
    from += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
}

// Another process that has imported an extent holds a lock on its bytes, for as long as it maps them.  Locks belong to
// open files here, so the kernel takes them back however the importer ends.
struct flock whole(uint64_t offset, uint64_t bytes, short type) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(offset);
  range.l_len = static_cast<off_t>(bytes);
  return range;
}

bool lent(int file, uint64_t offset, uint64_t bytes) {
  struct flock range = whole(offset, bytes, F_WRLCK);
  return fcntl(file, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

class Heap {
 public:
  static Heap &get() {
    static Heap *const heap = [] {
      alignas(Heap) static std::byte storage[sizeof(Heap)];
      return std::construct_at(reinterpret_cast<Heap *>(storage));
    }();
    return *heap;
  }

  int file() const { return file_; }

  uint64_t take(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    require(file_ >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    std::erase_if(lent_, [&](const auto &extent) {
      if (lent(file_, extent.first, extent.second)) return false;
      free_locked(extent.first, extent.second);
      return true;
    });
    const auto best = std::find_if(free_.begin(), free_.end(), [&](const auto &hole) { return hole.second >= bytes; });
    if (best != free_.end()) {
      const auto [offset, size] = *best;
      free_.erase(best);
      if (size > bytes) free_.emplace(offset + bytes, size - bytes);
      return offset;
    }
    const uint64_t offset = end_;
    require(ftruncate(file_, static_cast<off_t>(offset + bytes)) == 0, CUDA_ERROR_OUT_OF_MEMORY);
    end_ = offset + bytes;
    return offset;
  }

  // What another process still maps stays as it is, and is looked at again when memory is taken.
  void give_back(uint64_t offset, uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (lent(file_, offset, bytes))
      lent_.emplace(offset, bytes);
    else
      free_locked(offset, bytes);
  }

 private:
  void free_locked(uint64_t offset, uint64_t bytes) {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    auto at = free_.emplace(offset, bytes).first;
    if (const auto next = std::next(at); next != free_.end() && at->first + at->second == next->first) {
      at->second += next->second;
      free_.erase(next);
    }
    if (at != free_.begin()) {
      const auto before = std::prev(at);
      if (before->first + before->second == at->first) {
        before->second += at->second;
        free_.erase(at);
      }
    }
  }

  std::mutex mutex_;
  int file_ = memfd_create("softcuda", MFD_CLOEXEC);
  uint64_t end_ = 0;
  std::map<uint64_t, uint64_t> free_;  // holes by offset
  std::map<uint64_t, uint64_t> lent_;  // given back here, mapped elsewhere
};

void poison(int file, uint64_t offset, uint64_t bytes) {
  const Settings &settings = process().settings;
  if (settings.poison < 0) return;
  std::vector<std::byte> pattern(std::min(bytes, settings.poison_whole ? kGranule : kPoisonedHead),
                                 static_cast<std::byte>(settings.poison));
  for (uint64_t at = 0; at < bytes; at += kGranule) {
    const uint64_t piece = std::min(bytes - at, kGranule);
    write_all(file, pattern.data(), std::min<uint64_t>(piece, pattern.size()), offset + at);
    if (piece > pattern.size()) write_all(file, pattern.data(), kPage, offset + at + piece - kPage);
  }
}

// The extent and its trailer.
uint64_t footprint(uint64_t bytes, bool shareable) {
  return bytes + (shareable ? kPage : 0);
}

// Arbitrary places are below the fixed bases that programs like to reserve, and above small numbers.
#ifdef __SANITIZE_THREAD__
// The thread sanitizer knows of few addresses.
constexpr uint64_t kLowest = 0x7e8000000000;
constexpr uint64_t kHighest = 0x7f0000000000;
#else
constexpr uint64_t kLowest = uint64_t{0x20} << 40;
constexpr uint64_t kHighest = uint64_t{0x5e} << 40;
#endif

}  // namespace

Extent::Extent(CUdevice device, uint64_t bytes, bool shareable)
    : file_(Heap::get().file()),
      offset_(Heap::get().take(footprint(bytes, shareable))),
      bytes_(bytes),
      device_(device),
      shareable_(shareable),
      foreign_(false) {
  try {
    poison(file_, offset_, bytes_);
    if (shareable_) {
      const Trailer trailer{kTrailerMagic, offset_, bytes_, device_, 0};
      write_all(file_, &trailer, sizeof trailer, offset_ + bytes_);
    }
  } catch (const Failure &) {
    Heap::get().give_back(offset_, footprint(bytes_, shareable_));
    throw;
  }
}

Extent::Extent(int file, uint64_t offset, uint64_t bytes, CUdevice device)
    : file_(file), offset_(offset), bytes_(bytes), device_(device), shareable_(true), foreign_(true) {}

Extent::~Extent() {
  if (foreign_) {
    close(file_);
  } else {
    Heap::get().give_back(offset_, footprint(bytes_, shareable_));
  }
}

void Extent::map(uint64_t address, uint64_t bytes, int protection) const {
  void *const at = mmap(reinterpret_cast<void *>(address), bytes, protection, MAP_SHARED | MAP_FIXED, file_,
                        static_cast<off_t>(offset_));
  require(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
  // Device memory is not copied into, nor visible in, forked children.
  madvise(at, bytes, MADV_DONTFORK);
}

int Extent::export_descriptor() const {
  // Opened afresh, since duplicates share one file offset.
  const std::string path = "/proc/self/fd/" + std::to_string(file_);
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  require(descriptor >= 0, CUDA_ERROR_OPERATING_SYSTEM);
  if (lseek(descriptor, static_cast<off_t>(offset_ + bytes_), SEEK_SET) < 0) {
    close(descriptor);
    throw Failure{CUDA_ERROR_OPERATING_SYSTEM};
  }
  return descriptor;
}

std::shared_ptr<Extent> Extent::import_descriptor(int descriptor) {
  const off_t at = lseek(descriptor, 0, SEEK_CUR);
  require(at >= 0, CUDA_ERROR_UNKNOWN);
  Trailer trailer{};
  require(pread(descriptor, &trailer, sizeof trailer, at) == static_cast<ssize_t>(sizeof trailer));
  require(trailer.magic == kTrailerMagic && trailer.offset + trailer.bytes == static_cast<uint64_t>(at));
  const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  require(own >= 0, CUDA_ERROR_OPERATING_SYSTEM);
  struct flock range = whole(trailer.offset, trailer.bytes, F_RDLCK);
  if (fcntl(own, F_OFD_SETLK, &range) != 0) {
    close(own);
    throw Failure{CUDA_ERROR_OPERATING_SYSTEM};
  }
  return std::make_shared<Extent>(own, trailer.offset, trailer.bytes, trailer.device);
}

int heap_file() {
  return Heap::get().file();
}

bool place_at(uint64_t address, uint64_t bytes) {
  void *const wanted = reinterpret_cast<void *>(address);
  void *const at =
      mmap(wanted, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (at == MAP_FAILED) return false;
  if (at == wanted) return true;
  munmap(at, bytes);  // a kernel that does not know MAP_FIXED_NOREPLACE
  return false;
}

uint64_t place_anywhere(uint64_t bytes, uint64_t alignment) {
  require(bytes < kHighest - kLowest, CUDA_ERROR_OUT_OF_MEMORY);
  const uint64_t span = kHighest - kLowest - bytes;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const uint64_t address = round_up(kLowest + draw() % span, alignment);
    if (place_at(address, bytes)) return address;
  }
  throw Failure{CUDA_ERROR_OUT_OF_MEMORY};
}

void blank(uint64_t address, uint64_t bytes) {
  mmap(reinterpret_cast<void *>(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
}

void give_up(uint64_t address, uint64_t bytes) {
  munmap(reinterpret_cast<void *>(address), bytes);
}

}  // namespace softcuda
