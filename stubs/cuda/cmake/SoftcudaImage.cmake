# SPDX-License-Identifier: Apache-2.0
#
#   softcuda_add_image(NAME name SOURCES a.cpp ... [DEFINITIONS A=1 ...] [INCLUDES dir ...] [NO_INSTALL] [EXCEPTIONS])
#
# Builds kernels for the software driver into images/name.fatbin: a fat-binary container around a shared object with
# the same bytes wherever it is built.  The container's path is the target property SOFTCUDA_FATBIN of
# softcuda_image_<name>_fatbin.  With EXCEPTIONS kernels may throw, which fails their launch; the image then has a C++
# runtime of its own, which is 90 KB.
set(_softcuda_root ${CMAKE_CURRENT_LIST_DIR}/..)

function(softcuda_add_image)
  cmake_parse_arguments(IMAGE "NO_INSTALL;EXCEPTIONS" "NAME" "SOURCES;DEFINITIONS;INCLUDES" ${ARGN})
  set(target softcuda_image_${IMAGE_NAME})
  add_library(${target} MODULE ${IMAGE_SOURCES})
  set_target_properties(${target} PROPERTIES
    PREFIX "" OUTPUT_NAME ${IMAGE_NAME} CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/images BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
  target_include_directories(${target} PRIVATE ${_softcuda_root}/include ${IMAGE_INCLUDES})
  target_compile_definitions(${target} PRIVATE ${IMAGE_DEFINITIONS})
  # Every load of an image is an instance of its own: nothing in it may be unique in the process.
  target_compile_options(${target} PRIVATE -O2 -fno-gnu-unique -fno-semantic-interposition
    -ffile-prefix-map=${PROJECT_SOURCE_DIR}=. -ffile-prefix-map=${CMAKE_BINARY_DIR}=build)
  target_link_options(${target} PRIVATE -Wl,--build-id=none -Wl,-s -Wl,-z,now -Wl,-z,defs
    -Wl,-z,start-stop-visibility=hidden)

  if(IMAGE_EXCEPTIONS)
    foundryd_static_runtime(${target})
  else()
    target_compile_options(${target} PRIVATE -fno-exceptions)
  endif()

  set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/images/${IMAGE_NAME}.fatbin)
  set(wrap ${_softcuda_root}/cmake/wrap_image.py)
  add_custom_command(
    OUTPUT ${fatbin}
    COMMAND ${Python_EXECUTABLE} ${wrap} $<TARGET_FILE:${target}> ${fatbin}
    DEPENDS ${target} ${wrap} VERBATIM)
  add_custom_target(${target}_fatbin ALL DEPENDS ${fatbin})
  set_target_properties(${target}_fatbin PROPERTIES SOFTCUDA_FATBIN ${fatbin})
  if(NOT IMAGE_NO_INSTALL)
    install(FILES ${fatbin} DESTINATION ${FOUNDRYD_NATIVE_DIR}/images)
  endif()
endfunction()
