// SPDX-License-Identifier: Apache-2.0
//
// Where peers' memory lies: rank p's arenas are seen through window p, on every rank, p included.  So an address in a
// peer's memory does not depend on who looks, and a graph that holds it is the same on every rank.
//
// Windows follow the arenas, each as large as one arena.  A window shows the first quarter of an arena's addresses for
// `default`, `weights` and `kv`, the first eighth for `io` and `graph`, in that order.  Windows are reserved one at a
// time, when something is first mapped there.
#ifndef FOUNDRYD_HOOK_MEMORY_WINDOWS_H
#define FOUNDRYD_HOOK_MEMORY_WINDOWS_H

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "foundryd/records.h"
#include "memory/backing.h"
#include "memory/ipc_handle.h"
#include "memory/placement.h"

namespace foundryd::memory {

inline constexpr uint32_t kWindows = FDY_RESERVATION_FIRST - FDY_ARENA_COUNT;

// Window `rank` as a whole.  Throws Error if there is none.
Extent window_of(const Space &space, uint32_t rank);
// Where window `rank` shows an extent of that rank's arenas.  Throws Error if it does not.
Extent window_extent(const Space &space, uint32_t rank, Extent extent);

class Windows {
 public:
  static Windows &instance();

  // Maps what the handle means, once however often it is opened; the allocation's address in the window.
  uint64_t open(const ipc::Ticket &ticket);
  // Undoes one `open`; waits for the device, as the driver does.
  CUresult close(uint64_t address);

  // Whether the address lies in a window that is in use.
  bool contains(uint64_t address) const noexcept;
  struct Found {
    uint64_t base;  // of the allocation, in the window
    uint64_t bytes;
    uint64_t id;  // unique in the process
  };
  std::optional<Found> find(uint64_t address) noexcept;
  // Every open allocation, by address.
  std::vector<fdy_window> list();

 private:
  struct Mapping {
    Extent extent;
    uint64_t process, number;  // whose, and which of its mappings
    uint32_t users;
  };
  struct Opened {
    uint64_t bytes;
    uint64_t origin;  // where it is on its rank
    uint64_t process, serial;
    uint64_t mapping;
    uint64_t id;
    uint32_t rank;
    uint32_t times;
  };
  struct Source {
    Memory memory;
    Mapped mapped;
    bool stand_in;
  };

  Windows() = default;
  static Source source_of(const ipc::Ticket &ticket, const ipc::Identity &self, const Space &space);
  void reserve_locked(const Space &space, uint32_t rank);
  Mapping &map_locked(const ipc::Ticket &ticket, const Space &space, Source source);
  CUresult settle() noexcept;
  void unmap_unused_locked() noexcept;

  std::mutex lock_;
  Space space_{};                         // of the windows, once one is reserved
  std::atomic<uint64_t> reserved_{0};     // one bit a rank
  std::map<uint64_t, Mapping> mappings_;  // by address in the window
  std::map<uint64_t, Opened> opened_;     // likewise
  uint64_t ids_ = 0;
};

}  // namespace foundryd::memory

#endif  // FOUNDRYD_HOOK_MEMORY_WINDOWS_H
