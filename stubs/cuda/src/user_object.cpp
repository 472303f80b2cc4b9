// SPDX-License-Identifier: Apache-2.0
//
// User objects: counted references that graphs, clones and executables keep.  The destructor runs on a thread of
// the driver, never inside the call that dropped the last reference.
#include "user_object.h"

#include "graph.h"

namespace softcuda {

void retain_user_object(UserObject &object, unsigned count) {
  object.references += count;
}

void drop_user_object(const std::shared_ptr<UserObject> &object, unsigned count) {
  require(object->references >= count);
  object->references -= count;
  if (object->references > 0) return;
  process().user_objects.remove(object.get());
  process().reaper->submit([destroy = object->destroy, data = object->data] { destroy(data); });
}

void release_user_objects(Graph &graph) {
  auto objects = std::move(graph.user_objects);
  graph.user_objects.clear();
  for (const auto &[object, count] : objects) drop_user_object(object, count);
}

}  // namespace softcuda

using namespace softcuda;

SOFTCUDA_API cuUserObjectCreate(CUuserObject *object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount,
                                unsigned int flags) {
  return locked_call([&] {
    require(object_out != nullptr && destroy != nullptr);
    require(initialRefcount > 0 && initialRefcount <= 0x7fffffffu);
    require(flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    const auto object = process().user_objects.make();
    object->data = ptr;
    object->destroy = destroy;
    object->references = initialRefcount;
    object->held_by_program = initialRefcount;
    *object_out = Handles<UserObject, CUuserObject>::handle(object);
  });
}

SOFTCUDA_API cuUserObjectRetain(CUuserObject object, unsigned int count) {
  return locked_call([&] {
    const auto found = process().user_objects.get(object, CUDA_ERROR_INVALID_VALUE);
    require(count > 0 && count <= 0x7fffffffu);
    retain_user_object(*found, count);
    found->held_by_program += count;
  });
}

SOFTCUDA_API cuUserObjectRelease(CUuserObject object, unsigned int count) {
  return locked_call([&] {
    const auto found = process().user_objects.get(object, CUDA_ERROR_INVALID_VALUE);
    require(count > 0 && count <= found->held_by_program);
    found->held_by_program -= count;
    drop_user_object(found, count);
  });
}

SOFTCUDA_API cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
  return locked_call([&] {
    const auto owner = graph_at(graph);
    const auto found = process().user_objects.get(object, CUDA_ERROR_INVALID_VALUE);
    require(count > 0 && count <= 0x7fffffffu && (flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE}) == 0);
    if ((flags & CU_GRAPH_USER_OBJECT_MOVE) != 0) {
      // References move from the program to the graph.
      require(count <= found->held_by_program);
      found->held_by_program -= count;
    } else {
      retain_user_object(*found, count);
    }
    owner->user_objects[found] += count;
  });
}

SOFTCUDA_API cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
  return locked_call([&] {
    const auto owner = graph_at(graph);
    const auto found = process().user_objects.get(object, CUDA_ERROR_INVALID_VALUE);
    const auto it = owner->user_objects.find(found);
    require(it != owner->user_objects.end() && count > 0 && count <= it->second);
    it->second -= count;
    if (it->second == 0) owner->user_objects.erase(it);
    drop_user_object(found, count);
  });
}
