// SPDX-License-Identifier: Apache-2.0
//
// What driver calls take on the host, in nanoseconds, with whatever is preloaded: run.py compares.
// Usage: hook_cost IMAGE, a file with the kernel `add_value(unsigned long long, unsigned, unsigned)`.
// It declares the driver's functions itself, so that it needs no CUDA to be built.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "foundryd/hook.h"

extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuModuleLoadData(void **, const void *);
int cuModuleGetFunction(void **, void *, const char *);
int cuStreamCreate(void **, unsigned);
int cuStreamSynchronize(void *);
int cuStreamBeginCapture_v2(void *, int);
int cuStreamEndCapture(void *, void **);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuGraphLaunch(void *, void *);
int cuGraphDestroy(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                   void **);
int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);
}

namespace {

constexpr int kCalls = 200;   // of one sample: fewer than a stream holds before a launch waits
constexpr int kSamples = 60;  // after some that are thrown away
constexpr int kWarmUp = 5;
constexpr uint64_t kArenaBase = 0x600000000000;
constexpr uint64_t kArenaStride = 256ULL << 30;

void check(int code, const char *call) {
  if (code != 0) throw std::runtime_error(std::string(call) + " failed with " + std::to_string(code));
}
#define CHECK(call) check((call), #call)

// A restoring process must have a layout before its first context; an empty one will do.
void give_layout() {
  auto api = reinterpret_cast<decltype(&fdy_hook_api)>(dlsym(RTLD_DEFAULT, "fdy_hook_api"));
  const char *mode = std::getenv("FOUNDRYD_MODE");
  if (api == nullptr || mode == nullptr || std::strcmp(mode, "restore") != 0) return;
  const fdy_layout layout{kArenaBase, kArenaStride, nullptr, 0};
  CHECK(api(FDY_HOOK_ABI)->set_layout(&layout));
}

std::string read_file(const char *path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string(path) + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// Prints the 10th, 50th and 90th percentile of nanoseconds a call; `after` is not timed.
void measure(const char *name, const std::function<void()> &sample, const std::function<void()> &after) {
  std::vector<double> nanoseconds;
  for (int i = 0; i < kWarmUp + kSamples; ++i) {
    const auto started = std::chrono::steady_clock::now();
    sample();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - started;
    after();
    if (i >= kWarmUp) nanoseconds.push_back(took.count() / kCalls);
  }
  std::sort(nanoseconds.begin(), nanoseconds.end());
  const auto at = [&](int percent) { return nanoseconds[nanoseconds.size() * percent / 100]; };
  std::printf("%s %.1f %.1f %.1f\n", name, at(10), at(50), at(90));
}

void run(const char *image) {
  give_layout();
  CHECK(cuInit(0));
  void *context = nullptr, *module = nullptr, *function = nullptr, *stream = nullptr;
  CHECK(cuDevicePrimaryCtxRetain(&context, 0));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuModuleLoadData(&module, read_file(image).c_str()));
  CHECK(cuModuleGetFunction(&function, module, "add_value"));
  CHECK(cuStreamCreate(&stream, 1));
  const auto wait = [&] { CHECK(cuStreamSynchronize(stream)); };

  // The runtime libraries ask for their pointers once and keep them.
  void *pointer = nullptr;
  int found = 0;
  CHECK(cuGetProcAddress_v2("cuLaunchKernel", &pointer, 12000, 0, &found));
  if (pointer == nullptr) throw std::runtime_error("cuGetProcAddress found no cuLaunchKernel");

  unsigned long long address = 0;
  unsigned value = 1, count = 0;  // nothing to do
  void *arguments[] = {&address, &value, &count};
  const auto launches = [&](decltype(&cuLaunchKernel) launch) {
    for (int i = 0; i < kCalls; ++i)
      check(launch(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, nullptr), "launch");
  };
  measure("launch", [&] { launches(cuLaunchKernel); }, wait);
  measure("launch_by_pointer", [&] { launches(reinterpret_cast<decltype(&cuLaunchKernel)>(pointer)); }, wait);

  void *graph = nullptr, *executable = nullptr;
  const auto captured = [&] {
    CHECK(cuStreamBeginCapture_v2(stream, 1));
    launches(cuLaunchKernel);
    CHECK(cuStreamEndCapture(stream, &graph));
  };
  measure("captured_launch", captured, [&] { CHECK(cuGraphDestroy(graph)); });

  CHECK(cuStreamBeginCapture_v2(stream, 1));
  CHECK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, arguments, nullptr));
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuGraphInstantiateWithFlags(&executable, graph, 0));
  const auto replays = [&] {
    for (int i = 0; i < kCalls; ++i) CHECK(cuGraphLaunch(executable, stream));
  };
  measure("graph_launch", replays, wait);

  const auto allocations = [](size_t bytes) {
    for (int i = 0; i < kCalls; ++i) {
      unsigned long long made = 0;
      CHECK(cuMemAlloc_v2(&made, bytes));
      CHECK(cuMemFree_v2(made));
    }
  };
  measure("allocate_and_free_64KiB", [&] { allocations(64 << 10); }, wait);
  measure("allocate_and_free_2MiB", [&] { allocations(2 << 20); }, wait);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: hook_cost IMAGE\n");
    return 2;
  }
  try {
    run(argv[1]);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
