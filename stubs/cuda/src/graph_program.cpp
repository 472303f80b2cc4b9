// SPDX-License-Identifier: Apache-2.0
//
// From a snapshot to a program, and running it.
#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "context.h"
#include "copies.h"
#include "event.h"
#include "graph_exec.h"
#include "launch.h"

namespace softcuda {

namespace {

using Steps = std::vector<uint32_t>;

// The work of a node; that of a kernel knows its cluster shape, which the node has among its attributes.
std::shared_ptr<const Work> with_cluster(const Node &node) {
  const auto *kernel = std::get_if<KernelWork>(node.work.get());
  const auto cluster = cluster_shape(node.attributes);
  if (kernel == nullptr || kernel->cluster == cluster) return node.work;
  KernelWork work = *kernel;
  work.cluster = cluster;
  return std::make_shared<const Work>(std::move(work));
}

class Flattener {
 public:
  explicit Flattener(const GraphExec &exec) : exec_(exec) {}

  // Appends the steps of a graph behind `entry`; the result is what must be done for all of it to be done.
  Steps flatten(const Graph &graph, const Steps &entry) {
    std::unordered_map<const Node *, Steps> ends;
    Steps exits;
    for (const Node *node : topological(graph)) {
      Steps after = node->dependencies.empty() ? entry : Steps{};
      for (const Edge &edge : node->dependencies) {
        const Steps &more = ends.at(edge.from);
        after.insert(after.end(), more.begin(), more.end());
      }
      Steps end = append(*node, after);
      if (node->dependents.empty()) exits.insert(exits.end(), end.begin(), end.end());
      ends.emplace(node, std::move(end));
    }
    return exits.empty() ? entry : exits;
  }

  std::vector<Step> take() { return std::move(steps_); }

 private:
  Steps append(const Node &node, const Steps &after) {
    if (const auto *child = std::get_if<ChildWork>(node.work.get())) return flatten(*child->graph, after);
    Step step;
    const bool off = exec_.disabled.count(&node) != 0;
    step.work = off ? std::make_shared<const Work>(EmptyWork{}) : with_cluster(node);
    step.after = after;
    std::sort(step.after.begin(), step.after.end());
    step.after.erase(std::unique(step.after.begin(), step.after.end()), step.after.end());
    steps_.push_back(std::move(step));
    return {static_cast<uint32_t>(steps_.size() - 1)};
  }

  const GraphExec &exec_;
  std::vector<Step> steps_;
};

bool instant(const Work &work) {
  switch (node_type(work)) {
    case CU_GRAPH_NODE_TYPE_EMPTY:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return true;
    default:
      return false;
  }
}

constexpr uint32_t kNoLane = ~0u;
constexpr uint32_t kMostLanes = 16;

// Deals steps to lanes.  A chain stays in one lane; a step that only marks a point runs in its predecessor's lane;
// a wait that starts a branch runs in the lane of what waits for it.
void deal(Program &program) {
  auto &steps = program.steps;
  std::vector<uint32_t> first_dependent(steps.size(), kNoLane);
  for (uint32_t i = 0; i < steps.size(); ++i) {
    for (const uint32_t before : steps[i].after) first_dependent[before] = std::min(first_dependent[before], i);
  }
  constexpr uint32_t kNone = ~0u;
  std::vector<uint32_t> tails;  // last step of each lane
  std::vector<uint32_t> deferred;
  const auto root_wait = [&](uint32_t i) {
    return node_type(*steps[i].work) == CU_GRAPH_NODE_TYPE_WAIT_EVENT && steps[i].after.empty() &&
           first_dependent[i] != kNone;
  };
  for (uint32_t i = 0; i < steps.size(); ++i) {
    Step &step = steps[i];
    if (root_wait(i)) {
      deferred.push_back(i);
      continue;
    }
    if (instant(*step.work) && !step.after.empty() && !root_wait(step.after.back())) {
      step.lane = steps[step.after.back()].lane;
      continue;
    }
    uint32_t lane = kNone;
    for (const uint32_t before : step.after) {
      if (root_wait(before)) continue;
      const uint32_t candidate = steps[before].lane;
      const uint32_t tail = tails[candidate];
      // A step that only marks a point sits behind the tail of its lane without being it.
      const auto &marked = steps[before].after;
      const bool behind = instant(*steps[before].work) && std::find(marked.begin(), marked.end(), tail) != marked.end();
      if (tail == before || behind) lane = std::min(lane, candidate);
    }
    if (lane == kNone) {
      if (tails.size() < kMostLanes) {
        lane = static_cast<uint32_t>(tails.size());
        tails.push_back(i);
      } else {
        lane = i % kMostLanes;
      }
    }
    step.lane = lane;
    tails[lane] = i;
  }
  for (auto it = deferred.rbegin(); it != deferred.rend(); ++it) steps[*it].lane = steps[first_dependent[*it]].lane;
  program.lanes = std::max<uint32_t>(1, static_cast<uint32_t>(tails.size()));
  for (const Step &step : steps) {
    for (const uint32_t before : step.after) {
      if (steps[before].lane != step.lane) steps[before].awaited = true;
    }
  }
}

// One launch.
class Run {
 public:
  Run(std::shared_ptr<const Program> program, std::vector<std::shared_ptr<Fence>> fences)
      : program_(std::move(program)), fences_(std::move(fences)), done_(program_->steps.size()) {}

  void lane(uint32_t lane) {
    const auto &steps = program_->steps;
    for (uint32_t i = 0; i < steps.size(); ++i) {
      if (steps[i].lane != lane) continue;
      for (const uint32_t before : steps[i].after) {
        if (steps[before].lane != lane) await(before);
      }
      try {
        run(i);
      } catch (...) {
        failed_ = true;
      }
      if (steps[i].awaited) finish(i);
    }
  }

  void check() const {
    if (failed_) throw Failure{CUDA_ERROR_LAUNCH_FAILED};
  }

 private:
  void run(uint32_t i) {
    const Work &work = *program_->steps[i].work;
    if (const auto *kernel = std::get_if<KernelWork>(&work)) {
      run_kernel(*kernel);
    } else if (const auto *copy = std::get_if<CopyWork>(&work)) {
      run_copy(copy->params);
    } else if (const auto *fill = std::get_if<FillWork>(&work)) {
      run_fill(fill->params);
    } else if (const auto *host = std::get_if<HostWork>(&work)) {
      host->params.fn(host->params.userData);
    } else if (std::holds_alternative<WaitWork>(work)) {
      if (fences_[i] != nullptr) fences_[i]->wait();
    } else if (std::holds_alternative<RecordWork>(work)) {
      fences_[i]->signal();
    }
  }

  void await(uint32_t i) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_[i] != 0; });
  }

  void finish(uint32_t i) {
    const std::lock_guard lock(mutex_);
    done_[i] = 1;
    changed_.notify_all();
  }

  std::shared_ptr<const Program> program_;
  std::vector<std::shared_ptr<Fence>> fences_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> done_;
  std::atomic<bool> failed_{false};
};

}  // namespace

std::shared_ptr<const Program> make_program(const GraphExec &exec) {
  auto program = std::make_shared<Program>();
  Flattener flattener(exec);
  flattener.flatten(*exec.snapshot, {});
  program->steps = flattener.take();
  deal(*program);
  return program;
}

void launch_program(GraphExec &exec, Stream &stream) {
  if (exec.program == nullptr) exec.program = make_program(exec);
  const auto program = exec.program;
  const auto context = stream.context.lock();
  // Events are recorded and waited for in the order of the calls, and a launch is one call.
  std::vector<std::shared_ptr<Fence>> fences(program->steps.size());
  for (size_t i = 0; i < fences.size(); ++i) {
    const Work &work = *program->steps[i].work;
    if (const auto *record = std::get_if<RecordWork>(&work)) {
      fences[i] = std::make_shared<Fence>();
      record->event->fence = fences[i];
      record->event->captured = false;
    } else if (const auto *wait = std::get_if<WaitWork>(&work)) {
      fences[i] = wait->event->fence;
    }
  }
  std::vector<std::shared_ptr<Queue>> helpers;
  for (uint32_t lane = 1; lane < program->lanes; ++lane) {
    if (context->lanes.empty()) {
      helpers.push_back(std::make_shared<Queue>(context->fault));
    } else {
      helpers.push_back(std::move(context->lanes.back()));
      context->lanes.pop_back();
    }
  }
  const auto run = std::make_shared<Run>(program, std::move(fences));
  std::weak_ptr<Context> weak = context;
  exec.last = enqueue(stream, [run, before = exec.last, helpers = std::move(helpers), weak] {
    before.wait();
    std::vector<Mark> marks;
    for (size_t i = 0; i < helpers.size(); ++i) {
      marks.push_back(helpers[i]->submit([run, i] { run->lane(static_cast<uint32_t>(i + 1)); }));
    }
    run->lane(0);
    wait_all(marks);
    if (!helpers.empty()) {
      const Lock lock = lock_process();
      const auto owner = weak.lock();
      for (const auto &helper : helpers) {
        if (owner != nullptr && owner->active) {
          owner->lanes.push_back(helper);
        } else {
          helper->close();
        }
      }
    }
    run->check();
  });
}

}  // namespace softcuda
