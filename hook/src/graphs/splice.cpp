// SPDX-License-Identifier: Apache-2.0
#include "graphs/splice.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

struct Collective {
  CUgraphNode kernel = nullptr;
  std::vector<CUgraphNode> waits, records;
};

// FOUNDRYD_SPLICE: `inline` (the default) or `child`, to compare the two.
bool as_child_always() {
  const char *text = std::getenv("FOUNDRYD_SPLICE");
  if (!text || !*text || !std::strcmp(text, "inline")) return false;
  if (!std::strcmp(text, "child")) return true;
  throw Error(FDY_ERROR_INVALID, "FOUNDRYD_SPLICE is '%s', not 'inline' or 'child': unset it or correct it", text);
}

// The parts of a small graph, if it is nothing but waits, one kernel and records.
std::optional<Collective> take_apart(CUgraph small) {
  Collective out;
  for (CUgraphNode node : nodes_of(small)) {
    CUgraphNodeType type{};
    FDY_CU(cuGraphNodeGetType, node, &type);
    if (type == CU_GRAPH_NODE_TYPE_WAIT_EVENT) {
      out.waits.push_back(node);
    } else if (type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
      out.records.push_back(node);
    } else if (type == CU_GRAPH_NODE_TYPE_KERNEL && out.kernel == nullptr) {
      out.kernel = node;
    } else {
      return std::nullopt;
    }
  }
  if (out.kernel == nullptr) return std::nullopt;
  size_t expected = out.waits.size() + out.records.size();
  for (const Edge &e : edges_of(small)) {
    const bool plain = e.from_port == 0 && e.to_port == 0 && e.type == CU_GRAPH_DEPENDENCY_TYPE_DEFAULT;
    const CUgraphNode other = e.from == out.kernel ? e.to : e.from;
    if (!plain || (e.from != out.kernel && e.to != out.kernel)) return std::nullopt;
    const auto &side = e.from == out.kernel ? out.records : out.waits;
    if (std::find(side.begin(), side.end(), other) == side.end()) return std::nullopt;
    --expected;
  }
  return expected == 0 ? std::optional(std::move(out)) : std::nullopt;
}

CUgraphNode copy_kernel(CUgraph target, CUgraphNode source) {
  CUDA_KERNEL_NODE_PARAMS_v2 params{};
  FDY_CU(cuGraphKernelNodeGetParams_v2, source, &params);
  CUgraphNode node = nullptr;
  FDY_CU(cuGraphAddKernelNode_v2, &node, target, nullptr, 0, &params);
  FDY_CU(cuGraphKernelNodeCopyAttributes, node, source);
  return node;
}

}  // namespace

Spliced splice(CUgraph target, CUgraph small) {
  Spliced out{};
  const std::optional<Collective> parts = as_child_always() ? std::nullopt : take_apart(small);
  if (!parts) {
    FDY_CU(cuGraphAddChildGraphNode, &out.body, target, nullptr, 0, small);
    out.heads = out.tails = out.made = {out.body};
    return out;
  }
  for (CUgraphNode wait : parts->waits) {
    CUevent event = nullptr;
    FDY_CU(cuGraphEventWaitNodeGetEvent, wait, &event);
    FDY_CU(cuGraphAddEventWaitNode, &out.made.emplace_back(), target, nullptr, 0, event);
    out.heads.push_back(out.made.back());
  }
  out.body = copy_kernel(target, parts->kernel);
  out.made.push_back(out.body);
  for (CUgraphNode head : out.heads) out.edges.push_back({head, out.body});
  for (CUgraphNode record : parts->records) {
    CUevent event = nullptr;
    FDY_CU(cuGraphEventRecordNodeGetEvent, record, &event);
    FDY_CU(cuGraphAddEventRecordNode, &out.made.emplace_back(), target, nullptr, 0, event);
    out.tails.push_back(out.made.back());
    out.edges.push_back({out.body, out.made.back()});
  }
  if (out.heads.empty()) out.heads = {out.body};
  if (out.tails.empty()) out.tails = {out.body};
  return out;
}

}  // namespace foundryd::graphs
