// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "arrays.h"

namespace foundryd::bindings {
namespace {

// A graph as arrays that Python owns.
struct GraphArrays {
  py::array_t<fdy_node> nodes;
  py::array_t<fdy_edge> edges;
  py::array_t<fdy_attribute> attributes;
  py::array_t<uint8_t> params;
  py::list children;  // of GraphArrays
};

// Children are built by recursion, so their depth is bounded; the hook refuses the same.
constexpr int kMaximumDepth = 16;

GraphArrays copy_graph(const fdy_graph &graph) {
  GraphArrays out{copy_array(graph.nodes, graph.node_count), copy_array(graph.edges, graph.edge_count),
                  copy_array(graph.attributes, graph.attribute_count), copy_array(graph.params, graph.param_bytes),
                  py::list()};
  for (uint64_t i = 0; i < graph.child_count; ++i) out.children.append(py::cast(copy_graph(graph.children[i])));
  return out;
}

// fdy_graph views of GraphArrays; keeps the arrays and the children's structs alive.
class GraphView {
 public:
  GraphView(const GraphArrays &arrays, int depth)
      : nodes_(require<fdy_node>(arrays.nodes, "nodes")),
        edges_(require<fdy_edge>(arrays.edges, "edges")),
        attributes_(require<fdy_attribute>(arrays.attributes, "attributes")),
        params_(require<uint8_t>(arrays.params, "params")) {
    if (depth > kMaximumDepth)
      raise("UsageError",
            "a graph has children more than " + std::to_string(kMaximumDepth) + " deep: flatten the graph");
    for (const py::handle child : arrays.children) {
      owned_.push_back(std::make_unique<GraphView>(child.cast<const GraphArrays &>(), depth + 1));
      children_.push_back(owned_.back()->graph());
    }
  }

  fdy_graph graph() const {
    return {nodes_.data(),      static_cast<uint64_t>(nodes_.size()),
            edges_.data(),      static_cast<uint64_t>(edges_.size()),
            attributes_.data(), static_cast<uint64_t>(attributes_.size()),
            params_.data(),     static_cast<uint64_t>(params_.size()),
            children_.data(),   children_.size()};
  }

 private:
  py::array_t<fdy_node> nodes_;
  py::array_t<fdy_edge> edges_;
  py::array_t<fdy_attribute> attributes_;
  py::array_t<uint8_t> params_;
  std::vector<std::unique_ptr<GraphView>> owned_;
  std::vector<fdy_graph> children_;
};

void *handle(uint64_t value) {
  return reinterpret_cast<void *>(static_cast<uintptr_t>(value));
}

GraphArrays read_graph(const Hook &hook, uint64_t graph) {
  fdy_graph *read = nullptr;
  hook.call(hook->read_graph, handle(graph), &read);
  const std::unique_ptr<fdy_graph, void (*)(fdy_graph *)> owner(read, hook->free_graph);
  return copy_graph(*read);
}

std::vector<void *> handles(const std::vector<uint64_t> &values) {
  std::vector<void *> out;
  out.reserve(values.size());
  for (const uint64_t value : values) out.push_back(handle(value));
  return out;
}

// What the hook keeps from one building to the next.
class BuildMemory {
 public:
  explicit BuildMemory(const Hook &hook) : hook_(hook) { hook.call(hook->make_build_memory, &memory_); }
  ~BuildMemory() { hook_->free_build_memory(memory_); }
  BuildMemory(const BuildMemory &) = delete;
  BuildMemory &operator=(const BuildMemory &) = delete;
  void *get() const { return memory_; }

 private:
  const Hook hook_;
  void *memory_ = nullptr;
};

void *build(const Hook &hook, const GraphArrays &arrays, const Array<uint64_t> &functions,
            const std::vector<uint64_t> &comm_graphs, const BuildMemory *memory, fdy_buffer *nodes) {
  const GraphView view(arrays, 0);
  const fdy_graph graph = view.graph();
  const std::vector<void *> comm = handles(comm_graphs);
  void *built = nullptr;
  hook.call(hook->build_graph, &graph, functions.data(), static_cast<uint64_t>(functions.size()),
            static_cast<void *const *>(comm.data()), static_cast<uint64_t>(comm.size()),
            memory == nullptr ? nullptr : memory->get(), &built, nodes);
  return built;
}

uint64_t build_graph(const Hook &hook, const GraphArrays &arrays, const Array<uint64_t> &functions,
                     const std::vector<uint64_t> &comm_graphs, const BuildMemory *memory) {
  return reinterpret_cast<uintptr_t>(build(hook, arrays, functions, comm_graphs, memory, nullptr));
}

py::tuple build_graph_and_nodes(const Hook &hook, const GraphArrays &arrays, const Array<uint64_t> &functions,
                                const std::vector<uint64_t> &comm_graphs) {
  Buffer nodes(hook);
  const auto built = reinterpret_cast<uintptr_t>(build(hook, arrays, functions, comm_graphs, nullptr, nodes.out()));
  static_assert(sizeof(void *) == sizeof(uint64_t));
  return py::make_tuple(built, copy_array<uint64_t>(nodes));
}

void set_kernel_params(const Hook &hook, uint64_t executable, const GraphArrays &arrays,
                       const Array<uint64_t> &functions, const Array<uint64_t> &nodes, const Array<uint32_t> &which) {
  const GraphView view(arrays, 0);
  const fdy_graph graph = view.graph();
  hook.call(hook->set_kernel_params, handle(executable), &graph, functions.data(),
            static_cast<uint64_t>(functions.size()), reinterpret_cast<void *const *>(nodes.data()),
            static_cast<uint64_t>(nodes.size()), which.data(), static_cast<uint64_t>(which.size()));
}

}  // namespace

void define_graphs(py::module_ &m, HookClass &hook) {
  py::class_<GraphArrays>(m, "GraphArrays",
                          "A graph as arrays: nodes in canonical order, edges, attributes, parameter bytes, children.")
      .def(py::init([](const py::object &nodes, const py::object &edges, const py::object &attributes,
                       const py::object &params, const py::list &children) {
             return GraphArrays{require<fdy_node>(nodes, "nodes"), require<fdy_edge>(edges, "edges"),
                                require<fdy_attribute>(attributes, "attributes"), require<uint8_t>(params, "params"),
                                children};
           }),
           py::arg("nodes"), py::arg("edges"), py::arg("attributes"), py::arg("params"),
           py::arg("children") = py::list())
      .def_readonly("nodes", &GraphArrays::nodes)
      .def_readonly("edges", &GraphArrays::edges)
      .def_readonly("attributes", &GraphArrays::attributes)
      .def_readonly("params", &GraphArrays::params)
      .def_readonly("children", &GraphArrays::children);

  py::class_<BuildMemory>(m, "BuildMemory",
                          "What building graphs needs meanwhile, kept from one to the next; for one at a time.");

  hook.def("read_graph", &read_graph, py::arg("graph"))
      .def("build_memory", [](const Hook &h) { return std::make_unique<BuildMemory>(h); })
      .def("build_graph", &build_graph, py::arg("graph"), py::arg("functions"),
           py::arg("comm_graphs") = std::vector<uint64_t>(), py::arg("memory") = py::none())
      .def("build_graph_and_nodes", &build_graph_and_nodes, py::arg("graph"), py::arg("functions"),
           py::arg("comm_graphs") = std::vector<uint64_t>())
      .def("set_kernel_params", &set_kernel_params, py::arg("executable"), py::arg("graph"), py::arg("functions"),
           py::arg("nodes"), py::arg("which"))
      .def(
          "destroy_graph", [](const Hook &h, uint64_t graph) { h.call(h->destroy_graph, handle(graph)); },
          py::arg("graph"));
}

}  // namespace foundryd::bindings
