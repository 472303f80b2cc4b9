// SPDX-License-Identifier: Apache-2.0
#include "process.h"

#include <pthread.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "context.h"
#include "random.h"

namespace softcuda {

namespace {

enum class State { Fresh, Ready, Forked };

std::atomic<State> state{State::Fresh};
std::mutex initialising;

std::string_view environment(const char *name) {
  const char *text = std::getenv(name);
  return text == nullptr ? std::string_view{} : std::string_view{text};
}

Settings read_settings() {
  Settings out;
  if (const auto text = environment("SOFTCUDA_DEVICES"); !text.empty()) {
    out.devices = static_cast<int>(std::strtol(text.data(), nullptr, 0));
    if (out.devices < 0 || out.devices > 64) out.devices = 1;
  }
  if (const auto text = environment("SOFTCUDA_MEMORY"); !text.empty()) {
    const uint64_t bytes = std::strtoull(text.data(), nullptr, 0);
    if (bytes >= uint64_t{64} << 20) out.memory = bytes;
  }
  if (const auto text = environment("SOFTCUDA_POISON"); text == "off") {
    out.poison = -1;
  } else if (text == "random") {
    out.poison = static_cast<int>(draw() % 255 + 1);
  } else if (!text.empty()) {
    out.poison = static_cast<int>(std::strtol(text.data(), nullptr, 0) & 0xff);
  }
  out.poison_whole = environment("SOFTCUDA_POISON_WHOLE") == "1";
  out.eager_loading = environment("CUDA_MODULE_LOADING") == "EAGER";
  return out;
}

struct Faults {
  uint64_t inside;
  uint64_t since;
  unsigned depth;
};

constinit thread_local Faults faults{};

uint64_t faults_of_thread() noexcept {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return static_cast<uint64_t>(usage.ru_minflt);
}

void forked() {
  if (state.load() == State::Ready) state.store(State::Forked);
}

}  // namespace

Process &process() {
  alignas(Process) static std::byte storage[sizeof(Process)];
  static Process *const instance = std::construct_at(reinterpret_cast<Process *>(storage));
  return *instance;
}

Thread &this_thread() {
  thread_local Thread thread;
  return thread;
}

CUresult initialised() {
  return state.load(std::memory_order_acquire) == State::Ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult initialise(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (state.load() == State::Forked) return CUDA_ERROR_NOT_INITIALIZED;
  const std::lock_guard once(initialising);
  if (state.load() == State::Ready) return CUDA_SUCCESS;
  Process &all = process();
  all.settings = read_settings();
  if (all.settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
  all.devices.resize(static_cast<size_t>(all.settings.devices));
  for (int i = 0; i < all.settings.devices; ++i) all.devices[static_cast<size_t>(i)].ordinal = i;
  all.reaper = std::make_shared<Queue>(std::make_shared<Fault>(CUDA_SUCCESS));
  pthread_atfork(nullptr, nullptr, forked);
  state.store(State::Ready, std::memory_order_release);
  return CUDA_SUCCESS;
}

Device &device_at(CUdevice ordinal) {
  auto &devices = process().devices;
  require(ordinal >= 0 && static_cast<size_t>(ordinal) < devices.size(), CUDA_ERROR_INVALID_DEVICE);
  return devices[static_cast<size_t>(ordinal)];
}

void CountedFaults::enter() noexcept {
  if (faults.depth++ == 0) faults.since = faults_of_thread();
}

void CountedFaults::leave() noexcept {
  if (--faults.depth == 0) faults.inside += faults_of_thread() - faults.since;
}

}  // namespace softcuda

using softcuda::process;
using softcuda::this_thread;

SOFTCUDA_API cuInit(unsigned int Flags) {
  return softcuda::initialise(Flags);
}

SOFTCUDA_API cuDriverGetVersion(int *driverVersion) {
  if (driverVersion == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *driverVersion = CUDA_VERSION;
  return CUDA_SUCCESS;
}

extern "C" __attribute__((visibility("default"))) void softcuda_set_owner(uint32_t owner) {
  this_thread().owner = owner < SOFTCUDA_OWNER_COUNT ? owner : uint32_t{SOFTCUDA_OWNER_ENGINE};
}

extern "C" __attribute__((visibility("default"))) int softcuda_counters(uint32_t owner, softcuda_counter_values *out) {
  if (owner >= SOFTCUDA_OWNER_COUNT || out == nullptr) return 1;
  const softcuda::Counters &from = process().counters[owner];
  *out = {from.launches, from.captures, from.graph_launches, from.instantiations, from.module_loads, from.allocations};
  return 0;
}

extern "C" __attribute__((visibility("default"))) void softcuda_count_faults(uint32_t on) {
  softcuda::CountedFaults::on.store(on != 0, std::memory_order_relaxed);
}

extern "C" __attribute__((visibility("default"))) uint64_t softcuda_faults() {
  return softcuda::faults.inside;
}
