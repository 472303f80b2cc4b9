// SPDX-License-Identifier: Apache-2.0
#include "soft/rendezvous.h"

#include <dirent.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "ncclstub/soft_wait.h"
#include "settings.h"

namespace ncclstub::soft {
namespace {

constexpr char kFolder[] = "/dev/shm";
constexpr char kPrefix[] = "foundryd-nccl-";
constexpr int kStaleSeconds = 30;  // more than making a segment and locking it takes

std::string segment_name(const Token &token) {
  std::string name = std::string("/") + kPrefix;
  for (const uint8_t byte : token) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    name += digits;
  }
  return name;
}

bool lock_byte(int descriptor, uint32_t rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

bool anybody_holds(int descriptor) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return fcntl(descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void remove_stale() {
  DIR *folder = opendir(kFolder);
  if (folder == nullptr) return;
  while (const dirent *entry = readdir(folder)) {
    if (std::strncmp(entry->d_name, kPrefix, sizeof kPrefix - 1) != 0) continue;
    const std::string name = std::string("/") + entry->d_name;
    const int descriptor = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (descriptor < 0) continue;  // another user's, or gone meanwhile
    struct stat status{};
    const bool old = fstat(descriptor, &status) == 0 && status.st_mtime + kStaleSeconds < time(nullptr);
    if (old && !anybody_holds(descriptor)) shm_unlink(name.c_str());
    close(descriptor);
  }
  closedir(folder);
}

void pause_briefly() {
  const timespec pause{0, 2'000'000};
  nanosleep(&pause, nullptr);
}

ncclResult_t map(CommState &state, uint64_t bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, state.descriptor, 0);
  if (memory == MAP_FAILED) return fail(ncclSystemError, "a segment cannot be mapped: %s", std::strerror(errno));
  state.segment = static_cast<Segment *>(memory);
  return ncclSuccess;
}

// The segment is new and nobody else writes to it: a fresh file is zero, which every field starts as.
ncclResult_t set_up(CommState &state, const std::string &name) {
  remove_stale();
  const uint64_t bytes = Segment::bytes(state.size);
  // Allocated now: memory that is missing is an error here and not a signal later.
  if (const int problem = posix_fallocate(state.descriptor, 0, static_cast<off_t>(bytes)); problem != 0) {
    shm_unlink(name.c_str());
    return fail(ncclSystemError, "a segment of %llu bytes does not fit in %s (%s): free some of it",
                static_cast<unsigned long long>(bytes), kFolder, std::strerror(problem));
  }
  NCCL_TRY(map(state, bytes));
  state.segment->size = state.size;
  raise(state.segment->ready, 1);
  return ncclSuccess;
}

ncclResult_t wait_until_set_up(CommState &state, const Deadline &deadline) {
  struct stat status{};
  while (fstat(state.descriptor, &status) == 0 && status.st_size < static_cast<off_t>(sizeof(Segment))) {
    if (deadline.passed())
      return fail(ncclRemoteError, "the rank that made the segment did not finish it: restart the group");
    pause_briefly();
  }
  const auto bytes = static_cast<uint64_t>(status.st_size);
  NCCL_TRY(map(state, std::min(bytes, Segment::bytes(state.size))));
  while (state.segment->ready.load(std::memory_order_acquire) == 0) {
    if (deadline.passed())
      return fail(ncclRemoteError, "the rank that made the segment did not finish it: restart the group");
    sleep_on(state.segment->ready, 0);
  }
  if (state.segment->size == state.size) return ncclSuccess;
  const uint32_t theirs = state.segment->size;
  munmap(state.segment, std::min(bytes, Segment::bytes(state.size)));
  state.segment = nullptr;
  return fail(ncclInvalidUsage, "this rank wants %u ranks and another one %u with the same unique id: make them agree",
              state.size, theirs);
}

ncclResult_t open_segment(CommState &state, const std::string &name, const Deadline &deadline) {
  for (;;) {
    state.descriptor = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (state.descriptor >= 0) {
      lock_byte(state.descriptor, state.rank);
      return set_up(state, name);
    }
    if (errno != EEXIST) {
      return fail(ncclSystemError, "no segment can be made in %s: %s", kFolder, std::strerror(errno));
    }
    state.descriptor = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
    if (state.descriptor >= 0) return wait_until_set_up(state, deadline);
    if (errno != ENOENT)
      return fail(ncclSystemError, "segment %s cannot be opened: %s", name.c_str(), std::strerror(errno));
    if (deadline.passed()) return fail(ncclRemoteError, "segment %s comes and goes: use a new unique id", name.c_str());
    pause_briefly();
  }
}

std::string missing_ranks(Segment &segment) {
  std::string out;
  int listed = 0;
  for (uint32_t rank = 0; rank < segment.size; ++rank) {
    if (segment.cell(rank).joined != 0) continue;
    if (listed++ == 8) return out + ", ...";
    out += (out.empty() ? "" : ", ") + std::to_string(rank);
  }
  return out;
}

bool somebody_died(const CommState &state) {
  for (uint32_t rank = 0; rank < state.size; ++rank) {
    if (state.segment->cell(rank).joined != 0 && !alive(state, rank)) return true;
  }
  return false;
}

ncclResult_t wait_for_all(CommState &state, const std::string &name, const Deadline &deadline) {
  Segment &segment = *state.segment;
  if (segment.members.fetch_add(1) + 1 == state.size) {
    shm_unlink(name.c_str());
    raise(segment.complete, 1);
    return ncclSuccess;
  }
  while (segment.complete.load(std::memory_order_acquire) == 0) {
    const bool lost = segment.failed != 0 || somebody_died(state);
    if (lost || deadline.passed()) {
      if (segment.complete != 0) return ncclSuccess;
      segment.failed = 1;
      wake(segment.complete);
      shm_unlink(name.c_str());
      const std::string missing = missing_ranks(segment);
      if (lost) {
        return fail(ncclRemoteError,
                    "another rank died or gave up while ranks %s of %u had not joined: restart the group",
                    missing.c_str(), state.size);
      }
      return fail(ncclRemoteError,
                  "rank %u waited %.1f s for ranks %s of %u, which did not join: look at them, or raise "
                  "FOUNDRYD_NCCL_TIMEOUT",
                  state.rank, static_cast<double>(state.timeout_ns) * 1e-9, missing.c_str(), state.size);
    }
    sleep_on(segment.complete, 0);
  }
  return ncclSuccess;
}

}  // namespace

std::shared_ptr<CommState> make_state() {
  return {new CommState, [](CommState *state) {
            if (state->segment != nullptr) munmap(state->segment, Segment::bytes(state->size));
            if (state->descriptor >= 0) close(state->descriptor);
            delete state;
          }};
}

ncclResult_t join(const Token &token, uint32_t rank, uint32_t size, std::shared_ptr<CommState> *out) {
  if (size > kMaxRanks) {
    return fail(ncclInvalidArgument, "%u ranks are more than the %u of this library: use fewer", size, kMaxRanks);
  }
  std::shared_ptr<CommState> state = make_state();
  state->rank = rank;
  state->size = size;
  state->timeout_ns = settings().timeout_ns;
  const Deadline deadline(*state);
  const std::string name = segment_name(token);
  NCCL_TRY(open_segment(*state, name, deadline));
  // Locked before it says so: who has joined and holds no lock is dead.
  if (!lock_byte(state->descriptor, rank) || state->segment->cell(rank).joined.exchange(1) != 0) {
    return fail(ncclInvalidUsage, "rank %u of %u joins twice with one unique id: give each process its own rank", rank,
                size);
  }
  NCCL_TRY(wait_for_all(*state, name, deadline));
  *out = std::move(state);
  return ncclSuccess;
}

Token derive(const Token &parent, const void *salt, size_t bytes) {
  // FNV-1a from two starts.  Names need to differ, not to resist anyone.
  Token out;
  for (uint64_t half = 0; half < 2; ++half) {
    uint64_t hash = 0xcbf29ce484222325 + half;
    const auto mix = [&hash](const void *data, size_t length) {
      for (size_t i = 0; i < length; ++i) {
        hash = (hash ^ static_cast<const uint8_t *>(data)[i]) * 0x100000001b3;
      }
    };
    mix(parent.data(), parent.size());
    mix(salt, bytes);
    std::memcpy(out.data() + half * sizeof hash, &hash, sizeof hash);
  }
  return out;
}

}  // namespace ncclstub::soft
