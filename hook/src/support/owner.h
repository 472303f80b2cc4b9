// SPDX-License-Identifier: Apache-2.0
//
// On whose behalf the calling thread calls the driver.  Overrides of communication functions hold a
// CommunicationScope around the real call: what the library allocates then stays outside the arenas, the modules that
// it loads are its own, and its calls are counted apart.
#ifndef FOUNDRYD_HOOK_SUPPORT_OWNER_H
#define FOUNDRYD_HOOK_SUPPORT_OWNER_H

#include <cstdint>

namespace foundryd {

enum class Owner : uint32_t { engine = 0, communication = 1 };

Owner owner() noexcept;
inline bool communicating() noexcept {
  return owner() == Owner::communication;
}

// Whether `caller`, an address in the program's code, belongs to a communication library.  Such libraries have threads
// of their own, which no override sees start.
bool is_communication_library(const void *caller) noexcept;

// Nests.  Tells the software driver too, whose counters are kept by owner.
class CommunicationScope {
 public:
  CommunicationScope() noexcept : CommunicationScope(true) {}
  // Does nothing if not `applies`.
  explicit CommunicationScope(bool applies) noexcept;
  ~CommunicationScope();
  CommunicationScope(const CommunicationScope &) = delete;
  CommunicationScope &operator=(const CommunicationScope &) = delete;

 private:
  Owner before_;
};

}  // namespace foundryd

#endif  // FOUNDRYD_HOOK_SUPPORT_OWNER_H
