// SPDX-License-Identifier: Apache-2.0
#include "memory/placement.h"

#include <iterator>

#include "support/error.h"

namespace foundryd::memory {
namespace {

bool is_small(uint64_t bytes) {
  return bytes <= kSmallLimit;
}

// Whether [base, base + bytes) meets an interval of `intervals` (address -> something with a size).
template <class Map, class Size>
bool meets(const Map &intervals, uint64_t base, uint64_t bytes, Size size) {
  auto next = intervals.lower_bound(base);
  if (next != intervals.end() && next->first < base + bytes) return true;
  if (next == intervals.begin()) return false;
  auto before = std::prev(next);
  return before->first + size(before->second) > base;
}

}  // namespace

Placement::Placement(uint64_t base, uint64_t bytes, uint64_t alignment)
    : base_(base), bytes_(bytes), alignment_(alignment), floor_(base) {
  free_granules_.emplace(base, bytes);
}

uint64_t Placement::rounded(uint64_t bytes) const {
  return round_up(bytes, is_small(bytes) ? alignment_ : kGranule);
}

void Placement::raise_floor(uint64_t address) {
  floor_ = round_up(address, kGranule);
  free_granules_.clear();
  if (floor_ < base_ + bytes_) free_granules_.emplace(floor_, base_ + bytes_ - floor_);
}

uint64_t Placement::take_granules(uint64_t bytes) {
  for (auto at = free_granules_.begin(); at != free_granules_.end(); ++at) {
    const Extent room{at->first, at->second};
    if (room.bytes < bytes) continue;
    free_granules_.erase(at);
    if (room.bytes > bytes) free_granules_.emplace(room.base + bytes, room.bytes - bytes);
    return room.base;
  }
  throw Error(FDY_ERROR_MEMORY, "an arena of %llu bytes has no room for %llu bytes more: raise FOUNDRYD_ARENA_STRIDE",
              static_cast<unsigned long long>(bytes_), static_cast<unsigned long long>(bytes))
      .answered_with(CUDA_ERROR_OUT_OF_MEMORY);
}

void Placement::give_granules(Extent extent) {
  if (extent.base < floor_) return;  // recorded space is never handed out again
  auto at = free_granules_.emplace(extent.base, extent.bytes).first;
  if (auto next = std::next(at); next != free_granules_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    free_granules_.erase(next);
  }
  if (at == free_granules_.begin()) return;
  if (auto before = std::prev(at); before->first + before->second == at->first) {
    before->second += at->second;
    free_granules_.erase(at);
  }
}

void Placement::give_small(Extent extent) {
  if (extent.base < floor_) return;
  const auto same_chunk = [](uint64_t a, uint64_t b) { return a / kGranule == b / kGranule; };
  auto at = free_small_.emplace(extent.base, extent.bytes).first;
  if (auto next = std::next(at);
      next != free_small_.end() && at->first + at->second == next->first && same_chunk(at->first, next->first)) {
    at->second += next->second;
    free_small_.erase(next);
  }
  if (at == free_small_.begin()) return;
  if (auto before = std::prev(at);
      before->first + before->second == at->first && same_chunk(before->first, at->first)) {
    before->second += at->second;
    free_small_.erase(at);
  }
}

Placement::Placed Placement::place(uint64_t bytes) {
  if (bytes > bytes_) take_granules(bytes);  // too large to be rounded safely; throws
  const uint64_t size = rounded(bytes);
  if (!is_small(bytes)) {
    const uint64_t base = take_granules(size);
    mappings_.emplace(base, Mapping{size, 1, ++numbers_});
    blocks_.emplace(base, size);
    return {base, Extent{base, size}};
  }
  Placed out{0, std::nullopt};
  auto room = free_small_.begin();
  while (room != free_small_.end() && room->second < size) ++room;
  if (room == free_small_.end()) {
    const Extent chunk{take_granules(kGranule), kGranule};
    mappings_.emplace(chunk.base, Mapping{chunk.bytes, 0, ++numbers_});
    room = free_small_.emplace(chunk.base, chunk.bytes).first;
    out.map = chunk;
  }
  const Extent found{room->first, room->second};
  free_small_.erase(room);
  if (found.bytes > size) free_small_.emplace(found.base + size, found.bytes - size);
  out.address = found.base;
  ++mappings_.at(round_down(found.base, kGranule)).blocks;
  blocks_.emplace(found.base, size);
  return out;
}

bool Placement::possible(uint64_t address, uint64_t bytes) const {
  if (bytes == 0 || bytes > bytes_ || address < base_ || address - base_ > bytes_ - bytes) return false;
  const uint64_t size = rounded(bytes);
  if (address - base_ > bytes_ - size) return false;
  if (!is_small(bytes)) return address % kGranule == 0;
  return address % alignment_ == 0 && address / kGranule == (address + size - 1) / kGranule;
}

std::optional<Placement::Placed> Placement::place_at(uint64_t address, uint64_t bytes) {
  const uint64_t size = rounded(bytes);
  if (!possible(address, bytes) || address + size > floor_) return std::nullopt;
  if (meets(blocks_, address, size, [](uint64_t block) { return block; })) return std::nullopt;
  const Extent extent = is_small(bytes) ? Extent{round_down(address, kGranule), kGranule} : Extent{address, size};
  auto mapping = mappings_.find(extent.base);
  const bool shared = is_small(bytes) && mapping != mappings_.end() && mapping->second.bytes == kGranule;
  if (!shared && meets(mappings_, extent.base, extent.bytes, [](const Mapping &m) { return m.bytes; }))
    return std::nullopt;
  if (shared)
    ++mapping->second.blocks;
  else
    mappings_.emplace(extent.base, Mapping{extent.bytes, 1, ++numbers_});
  blocks_.emplace(address, size);
  return Placed{address, shared ? std::nullopt : std::optional(extent)};
}

Mapped Placement::mapped_at(uint64_t address) const {
  const auto mapping = std::prev(mappings_.upper_bound(address));
  return {{mapping->first, mapping->second.bytes}, mapping->second.number};
}

std::optional<Extent> Placement::release(uint64_t address) {
  auto block = blocks_.find(address);
  if (block == blocks_.end()) return std::nullopt;
  const Extent freed{address, block->second};
  blocks_.erase(block);
  auto mapping = std::prev(mappings_.upper_bound(address));
  const Extent extent{mapping->first, mapping->second.bytes};
  const bool chunk = freed.bytes < kGranule;
  if (--mapping->second.blocks > 0) {
    give_small(freed);
    return std::nullopt;
  }
  mappings_.erase(mapping);
  if (chunk) free_small_.erase(free_small_.lower_bound(extent.base), free_small_.lower_bound(extent.end()));
  give_granules(extent);
  return extent;
}

}  // namespace foundryd::memory
