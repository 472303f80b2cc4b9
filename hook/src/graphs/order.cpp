// SPDX-License-Identifier: Apache-2.0
#include "graphs/order.h"

#include <algorithm>
#include <set>

namespace foundryd::graphs {
namespace {

// Each round lets a node's colour see one step further.  Creation order decides nearly everything, so this only has
// to tell apart what stands around a few memcpy or memset nodes.
constexpr int kColourRounds = 8;

struct Adjacency {
  std::vector<std::vector<OrderEdge>> in, out;
};

std::vector<uint64_t> colours(std::span<const OrderNode> nodes, const Adjacency &adjacency) {
  std::vector<uint64_t> now(nodes.size()), next(nodes.size()), around;
  for (size_t i = 0; i < nodes.size(); ++i) now[i] = nodes[i].shape;
  for (int round = 0; round < kColourRounds; ++round) {
    for (size_t i = 0; i < nodes.size(); ++i) {
      uint64_t hash = mix(0, now[i]);
      for (const bool incoming : {true, false}) {
        around.clear();
        for (const OrderEdge &e : incoming ? adjacency.in[i] : adjacency.out[i])
          around.push_back(mix(mix(0, now[incoming ? e.from : e.to]), e.kind));
        std::sort(around.begin(), around.end());
        hash = mix(hash, around.size());
        for (const uint64_t a : around) hash = mix(hash, a);
      }
      next[i] = hash;
    }
    now.swap(next);
  }
  return now;
}

// Indices in some topological order; shorter than the node count if there is a cycle.
std::vector<uint32_t> any_order(size_t count, const Adjacency &adjacency) {
  std::vector<uint32_t> order, missing(count);
  order.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    missing[i] = static_cast<uint32_t>(adjacency.in[i].size());
    if (missing[i] == 0) order.push_back(i);
  }
  for (size_t done = 0; done < order.size(); ++done)
    for (const OrderEdge &e : adjacency.out[order[done]])
      if (--missing[e.to] == 0) order.push_back(e.to);
  return order;
}

}  // namespace

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 33);
}

uint64_t mix(uint64_t hash, std::string_view text) {
  hash = mix(hash, text.size());
  for (const char c : text) hash = mix(hash, static_cast<unsigned char>(c));
  return hash;
}

std::vector<uint32_t> canonical_order(std::span<const OrderNode> nodes, std::span<const OrderEdge> edges) {
  const size_t count = nodes.size();
  Adjacency adjacency;
  adjacency.in.resize(count);
  adjacency.out.resize(count);
  for (const OrderEdge &e : edges) {
    if (e.from >= count || e.to >= count) return {};
    adjacency.in[e.to].push_back(e);
    adjacency.out[e.from].push_back(e);
  }
  const std::vector<uint32_t> some = any_order(count, adjacency);
  if (some.size() != count) return some;

  std::vector<uint64_t> due(count);
  for (auto it = some.rbegin(); it != some.rend(); ++it) {
    due[*it] = nodes[*it].creation;
    if (due[*it] != kUnknownCreation) continue;
    for (const OrderEdge &e : adjacency.out[*it]) due[*it] = std::min(due[*it], due[e.to]);
  }
  const std::vector<uint64_t> colour = colours(nodes, adjacency);

  std::vector<std::vector<uint32_t>> places(count);  // of a node's predecessors
  const auto before = [&](uint32_t a, uint32_t b) {
    if (due[a] != due[b]) return due[a] < due[b];
    if (colour[a] != colour[b]) return colour[a] < colour[b];
    if (places[a] != places[b]) return places[a] < places[b];
    if (nodes[a].bytes != nodes[b].bytes) return nodes[a].bytes < nodes[b].bytes;
    return a < b;  // nothing that a reader could see tells these two apart
  };
  std::set<uint32_t, decltype(before)> ready(before);
  std::vector<uint32_t> missing(count), order;
  order.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    missing[i] = static_cast<uint32_t>(adjacency.in[i].size());
    if (missing[i] == 0) ready.insert(i);
  }
  while (!ready.empty()) {
    const uint32_t node = *ready.begin();
    ready.erase(ready.begin());
    const auto place = static_cast<uint32_t>(order.size());
    order.push_back(node);
    for (const OrderEdge &e : adjacency.out[node]) {
      places[e.to].push_back(place);  // ascending, since places are handed out in order
      if (--missing[e.to] == 0) ready.insert(e.to);
    }
  }
  return order;
}

}  // namespace foundryd::graphs
