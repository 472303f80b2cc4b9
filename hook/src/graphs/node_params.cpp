// SPDX-License-Identifier: Apache-2.0
#include "graphs/node_params.h"

#include <algorithm>
#include <cstring>

#include "memory/arenas.h"
#include "support/driver.h"
#include "support/error.h"

namespace foundryd::graphs {
namespace {

template <class T>
ParamBytes as_bytes(const T &params) {
  ParamBytes out{FDY_PARAM_STRUCT, std::vector<uint8_t>(sizeof params)};
  std::memcpy(out.bytes.data(), &params, sizeof params);
  return out;
}

// A packed struct may have an address at any byte; objects are numbers, which only an aligned word says.
void refuse_foreign(const modules::UsedFunction &function, const std::vector<uint8_t> &bytes) {
  if (!memory::has_foreign_memory()) return;
  for (size_t at = 0; at + 8 <= bytes.size(); ++at) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    const char *what = memory::foreign_memory(word, 1);
    const bool object = what == nullptr && at % 8 == 0 && memory::is_texture_or_surface(word);
    if (what == nullptr && !object) continue;
    const auto &fields = function.params.fields;
    size_t place = 0;
    while (place + 1 < fields.size() && fields[place + 1].offset <= at) ++place;
    const auto number = static_cast<unsigned long long>(word);
    if (object)
      throw Error(FDY_ERROR_UNSUPPORTED,
                  "parameter %zu of kernel %s holds %llu, the number of a texture or surface object, which a restore "
                  "does not have: read linear memory, or destroy the objects before the capture ends if it is not one",
                  place, function.name.c_str(), number);
    throw Error(FDY_ERROR_UNSUPPORTED, "parameter %zu of kernel %s holds the address %#llx of %s", place,
                function.name.c_str(), number, what);
  }
}

// The packed buffer of CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE.
std::pair<const uint8_t *, size_t> extra_buffer(void *const *extra, const char *name) {
  const void *data = nullptr;
  size_t bytes = 0;
  for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
    if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      data = extra[i + 1];
    } else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      bytes = *static_cast<const size_t *>(extra[i + 1]);
    } else {
      throw Error(FDY_ERROR_UNSUPPORTED, "kernel %s was launched with the unknown extra option %p", name, extra[i]);
    }
  }
  if (data == nullptr && bytes != 0)
    throw Error(FDY_ERROR_UNSUPPORTED, "kernel %s has %zu bytes of parameters and no buffer for them", name, bytes);
  return {static_cast<const uint8_t *>(data), bytes};
}

// One side of a copy.
struct Side {
  const char *what;
  CUmemorytype type;
  const void *host;
  CUdeviceptr device;
};

// Which of the two addresses the side uses; throws if it would mean something else in another process.
void check_side(const Side &side) {
  if (side.type == CU_MEMORYTYPE_ARRAY)
    throw Error(FDY_ERROR_UNSUPPORTED,
                "the %s of a memcpy node is a CUDA array, which cannot be restored: copy to and "
                "from linear memory",
                side.what);
  const uint64_t address =
      side.type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uintptr_t>(side.host) : static_cast<uint64_t>(side.device);
  if (const char *what = memory::foreign_memory(address, 1))
    throw Error(FDY_ERROR_UNSUPPORTED, "the %s %#llx of a memcpy node is %s", side.what,
                static_cast<unsigned long long>(address), what);
  const auto place = memory::classify(address);
  bool host = side.type == CU_MEMORYTYPE_HOST;
  if (!host && !memory::in_arena_space(address)) {
    unsigned int type = 0;
    const CUresult code = FDY_CU_RESULT(cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                        static_cast<CUdeviceptr>(address));
    host = code != CUDA_SUCCESS || type == CU_MEMORYTYPE_HOST;  // the driver knows every device address
  }
  if (host && !(place && place->arena == FDY_ARENA_HOST))
    throw Error(FDY_ERROR_UNSUPPORTED,
                "the %s %#llx of a memcpy node is host memory outside the host arena: allocate it "
                "pinned (cuMemHostAlloc)",
                side.what, static_cast<unsigned long long>(address));
}

}  // namespace

ParamBytes kernel_params(const CUDA_KERNEL_NODE_PARAMS_v2 &params, const modules::UsedFunction &function) {
  const modules::ParamLayout &layout = function.params;
  ParamBytes out;
  if (params.kernelParams != nullptr && !layout.fields.empty()) {
    out.kind = FDY_PARAM_LIST;
    out.bytes.resize(layout.bytes);
    for (size_t i = 0; i < layout.fields.size(); ++i)
      std::memcpy(out.bytes.data() + layout.fields[i].offset, params.kernelParams[i], layout.fields[i].bytes);
  } else if (params.kernelParams == nullptr && params.extra != nullptr) {
    const auto [data, bytes] = extra_buffer(params.extra, function.name.c_str());
    if (bytes > layout.bytes)
      throw Error(FDY_ERROR_UNSUPPORTED, "kernel %s was launched with %zu bytes of parameters and takes %u",
                  function.name.c_str(), bytes, layout.bytes);
    if (bytes != 0) {
      out.kind = FDY_PARAM_EXTRA;
      out.bytes.resize(bytes);
      // Only what belongs to a parameter: the gaps are whatever was on the launching thread's stack.
      for (const fdy_field &field : layout.fields)
        if (field.offset < bytes)
          std::memcpy(out.bytes.data() + field.offset, data + field.offset,
                      std::min<size_t>(field.bytes, bytes - field.offset));
    }
  }
  if (out.kind == FDY_PARAM_NONE && !layout.fields.empty())
    throw Error(FDY_ERROR_UNSUPPORTED, "kernel %s takes %zu parameters and its node has none", function.name.c_str(),
                layout.fields.size());
  refuse_foreign(function, out.bytes);
  return out;
}

ParamBytes memcpy_params(const CUDA_MEMCPY3D_v2 &params) {
  check_side({"source", params.srcMemoryType, params.srcHost, params.srcDevice});
  check_side({"destination", params.dstMemoryType, params.dstHost, params.dstDevice});
  CUDA_MEMCPY3D_v2 clean;
  std::memset(&clean, 0, sizeof clean);
  clean.srcXInBytes = params.srcXInBytes;
  clean.srcY = params.srcY;
  clean.srcZ = params.srcZ;
  clean.srcLOD = params.srcLOD;
  clean.srcMemoryType = params.srcMemoryType;
  (params.srcMemoryType == CU_MEMORYTYPE_HOST ? void(clean.srcHost = params.srcHost)
                                              : void(clean.srcDevice = params.srcDevice));
  clean.srcPitch = params.srcPitch;
  clean.srcHeight = params.srcHeight;
  clean.dstXInBytes = params.dstXInBytes;
  clean.dstY = params.dstY;
  clean.dstZ = params.dstZ;
  clean.dstLOD = params.dstLOD;
  clean.dstMemoryType = params.dstMemoryType;
  (params.dstMemoryType == CU_MEMORYTYPE_HOST ? void(clean.dstHost = params.dstHost)
                                              : void(clean.dstDevice = params.dstDevice));
  clean.dstPitch = params.dstPitch;
  clean.dstHeight = params.dstHeight;
  clean.WidthInBytes = params.WidthInBytes;
  clean.Height = params.Height;
  clean.Depth = params.Depth;
  return as_bytes(clean);
}

ParamBytes memset_params(const CUDA_MEMSET_NODE_PARAMS_v1 &params) {
  if (const char *what = memory::foreign_memory(params.dst, 1))
    throw Error(FDY_ERROR_UNSUPPORTED, "the destination %#llx of a memset node is %s",
                static_cast<unsigned long long>(params.dst), what);
  CUDA_MEMSET_NODE_PARAMS_v1 clean = params;
  if (clean.height <= 1) clean.pitch = 0;  // unused
  return as_bytes(clean);
}

}  // namespace foundryd::graphs
