# SPDX-License-Identifier: Apache-2.0
#
# Defines the interface target foundryd::cuda_headers.  Only cuda.h is needed, never a CUDA library: the headers come
# from the nvidia-cuda-runtime wheel in the build environment, or from CUDA_HEADER_DIR.
if(NOT CUDA_HEADER_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u, pathlib as p
spec = u.find_spec('nvidia')
roots = list(spec.submodule_search_locations) if spec else []
found = [c for r in roots for c in p.Path(r).glob('*/include') if (c / 'cuda.h').exists()]
print(sorted(found)[-1] if found else '')"
    OUTPUT_VARIABLE CUDA_HEADER_DIR OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT EXISTS "${CUDA_HEADER_DIR}/cuda.h")
  message(FATAL_ERROR "cuda.h was not found ('${CUDA_HEADER_DIR}'): install nvidia-cuda-runtime 13.0 into the build "
                      "environment or set -DCUDA_HEADER_DIR=")
endif()
add_library(foundryd_cuda_headers INTERFACE)
target_include_directories(foundryd_cuda_headers SYSTEM INTERFACE ${CUDA_HEADER_DIR})
add_library(foundryd::cuda_headers ALIAS foundryd_cuda_headers)
message(STATUS "CUDA headers: ${CUDA_HEADER_DIR}")
