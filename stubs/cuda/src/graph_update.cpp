// SPDX-License-Identifier: Apache-2.0
//
// cuGraphExecUpdate: which changes an executable takes.
#include <unordered_map>

#include "graph_exec.h"

namespace softcuda {

namespace {

using NodeHandles = Handles<Node, CUgraphNode>;

UpdateResult refuse(CUgraphExecUpdateResult result, const Node *node = nullptr, const Node *from = nullptr) {
  return {result, NodeHandles::handle(node), NodeHandles::handle(from)};
}

bool accepted(const UpdateResult &result) {
  return result.result == CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

std::vector<const Node *> exits(const Graph &graph) {
  std::vector<const Node *> out;
  for (const auto &node : graph.nodes) {
    if (node->dependents.empty()) out.push_back(node.get());
  }
  return out;
}

int attribute(const Node &node, CUlaunchAttributeID id) {
  const auto it = node.attributes.find(id);
  return it == node.attributes.end() ? 0 : it->second.cooperative;  // every one asked for here is an int at 0
}

struct Pair {
  Node *target;
  const Node *source;
};

// Walks both graphs from their exits backwards; dependencies are paired by their order.
class Pairing {
 public:
  Pairing(const Graph &target, const Graph &source) : target_(target), source_(source) {}

  UpdateResult run() {
    if (target_.nodes.size() != source_.nodes.size()) return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
    const auto target_exits = exits(target_);
    const auto source_exits = exits(source_);
    if (target_exits.size() != source_exits.size()) {
      return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, source_exits.empty() ? nullptr : source_exits.back());
    }
    for (size_t i = 0; i < source_exits.size(); ++i) {
      if (const auto result = pair(target_exits[i], source_exits[i], nullptr); !accepted(result)) return result;
    }
    while (!open_.empty()) {
      const Pair next = open_.back();
      open_.pop_back();
      if (const auto result = visit(next); !accepted(result)) return result;
    }
    return {};
  }

  const std::vector<Pair> &pairs() const { return pairs_; }

 private:
  UpdateResult pair(const Node *target, const Node *source, const Node *whose) {
    const auto known_source = by_source_.find(source);
    const auto known_target = by_target_.find(target);
    if (known_source != by_source_.end() || known_target != by_target_.end()) {
      const bool same = known_source != by_source_.end() && known_source->second == target;
      if (same) return {};
      return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, whose, source);
    }
    by_source_.emplace(source, target);
    by_target_.emplace(target, source);
    pairs_.push_back({const_cast<Node *>(target), source});
    open_.push_back(pairs_.back());
    return {};
  }

  UpdateResult visit(const Pair &at) {
    const auto &before = at.target->dependencies;
    const auto &now = at.source->dependencies;
    if (before.size() != now.size()) return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, at.source);
    if (at.target->work->index() != at.source->work->index()) {
      return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, at.source);
    }
    for (size_t i = 0; i < now.size(); ++i) {
      const CUgraphEdgeData &a = before[i].data;
      const CUgraphEdgeData &b = now[i].data;
      if (a.from_port != b.from_port || a.to_port != b.to_port || a.type != b.type) {
        return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, at.source, now[i].from);
      }
      if (const auto result = pair(before[i].from, now[i].from, at.source); !accepted(result)) return result;
    }
    return {};
  }

  const Graph &target_;
  const Graph &source_;
  std::unordered_map<const Node *, const Node *> by_source_;
  std::unordered_map<const Node *, const Node *> by_target_;
  std::vector<Pair> pairs_;
  std::vector<Pair> open_;
};

UpdateResult check_kernel(const Pair &at, const KernelWork &before, const KernelWork &now, uint64_t flags) {
  if (before.context != now.context) {
    return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE, at.source);
  }
  constexpr auto kCooperative = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  constexpr auto kPriority = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  if (attribute(*at.target, kCooperative) != attribute(*at.source, kCooperative)) {
    return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED, at.source);
  }
  if ((flags & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY) != 0 &&
      attribute(*at.target, kPriority) != attribute(*at.source, kPriority)) {
    return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED, at.source);
  }
  return {};
}

bool copy_allowed(const CUDA_MEMCPY3D &before, const CUDA_MEMCPY3D &now) {
  const bool was_flat = before.Height == 1 && before.Depth == 1;
  const bool is_flat = now.Height == 1 && now.Depth == 1;
  return before.srcMemoryType == now.srcMemoryType && before.dstMemoryType == now.dstMemoryType && was_flat == is_flat;
}

bool fill_allowed(const CUDA_MEMSET_NODE_PARAMS &before, const CUDA_MEMSET_NODE_PARAMS &now) {
  if (before.height == 1 && now.height == 1) return true;
  return before.height == now.height && before.width == now.width && before.pitch == now.pitch &&
         before.elementSize == now.elementSize;
}

struct Changes {
  std::vector<Pair> nodes;
  std::vector<std::pair<Graph *, const Graph *>> graphs;  // the graph and its children
};

// Collects what has to change, children included, and refuses before anything has changed.
UpdateResult collect(Graph &target, const Graph &source, uint64_t flags, Changes &out) {
  Pairing pairing(target, source);
  if (const auto result = pairing.run(); !accepted(result)) return result;
  out.graphs.emplace_back(&target, &source);
  for (const Pair &at : pairing.pairs()) {
    const Work &before = *at.target->work;
    const Work &now = *at.source->work;
    if (const auto *kernel = std::get_if<KernelWork>(&now)) {
      if (const auto result = check_kernel(at, std::get<KernelWork>(before), *kernel, flags); !accepted(result)) {
        return result;
      }
    } else if (const auto *copy = std::get_if<CopyWork>(&now)) {
      if (!copy_allowed(std::get<CopyWork>(before).params, copy->params)) {
        return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED, at.source);
      }
    } else if (const auto *fill = std::get_if<FillWork>(&now)) {
      if (!fill_allowed(std::get<FillWork>(before).params, fill->params)) {
        return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED, at.source);
      }
    } else if (const auto *child = std::get_if<ChildWork>(&now)) {
      const auto result = collect(*std::get<ChildWork>(before).graph, *child->graph, flags, out);
      if (!accepted(result)) return result;
      continue;  // the child stays, its nodes change
    } else if (std::holds_alternative<AllocWork>(now) || std::holds_alternative<FreeWork>(now)) {
      return refuse(CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED, at.source);
    }
    out.nodes.push_back(at);
  }
  return {};
}

bool of_one_function(const Pair &at) {
  const auto *before = std::get_if<KernelWork>(&*at.target->work);
  const auto *now = std::get_if<KernelWork>(&*at.source->work);
  return before != nullptr && now != nullptr && before->function == now->function;
}

// A GPU takes over what a kernel's node sets, not that it sets less.  Once the executable was on the device it leaves
// the attributes of a kernel that stays the same one as they are, cluster shapes among them, and reports success.
void take_attributes(const Pair &at, bool on_device) {
  if (on_device && of_one_function(at)) return;
  for (const auto &[id, value] : at.source->attributes) at.target->attributes.insert_or_assign(id, value);
}

// The source's references are taken before the old ones are let go.
void take_user_objects(Graph &target, const Graph &source) {
  for (const auto &[object, count] : source.user_objects) retain_user_object(*object, count);
  release_user_objects(target);
  target.user_objects = source.user_objects;
}

}  // namespace

UpdateResult update_graph(Graph &target, const Graph &source, uint64_t flags, bool on_device) {
  Changes changes;
  if (const auto result = collect(target, source, flags, changes); !accepted(result)) return result;
  for (const Pair &at : changes.nodes) {
    take_attributes(at, on_device);
    at.target->work = at.source->work;
  }
  for (const auto &[to, from] : changes.graphs) take_user_objects(*to, *from);
  return {};
}

}  // namespace softcuda

using namespace softcuda;

namespace {

CUresult update(CUgraphExec hGraphExec, CUgraph hGraph, UpdateResult *out) {
  return locked_call([&] {
    *out = {CU_GRAPH_EXEC_UPDATE_ERROR, nullptr, nullptr};
    const auto exec = exec_at(hGraphExec);
    const auto graph = graph_at(hGraph);
    *out = update_graph(*exec->snapshot, *graph, exec->flags, exec->on_device);
    require(out->result == CU_GRAPH_EXEC_UPDATE_SUCCESS, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    exec->program.reset();
  });
}

}  // namespace

SOFTCUDA_API cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo) {
  if (resultInfo == nullptr) return CUDA_ERROR_INVALID_VALUE;
  UpdateResult result;
  const CUresult code = update(hGraphExec, hGraph, &result);
  *resultInfo = {result.result, result.node, result.from};
  return code;
}

SOFTCUDA_API cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
                               CUgraphExecUpdateResult *updateResult_out) {
  if (updateResult_out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  UpdateResult result;
  const CUresult code = update(hGraphExec, hGraph, &result);
  *updateResult_out = result.result;
  if (hErrorNode_out != nullptr) *hErrorNode_out = result.node;
  return code;
}
