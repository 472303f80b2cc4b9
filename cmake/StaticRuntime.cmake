# SPDX-License-Identifier: Apache-2.0
#
#   foundryd_static_runtime(target [HAS_DLSYM])
#
# Makes the C++ runtime part of a library that is loaded into other people's programs, whatever runtime those have, and
# lets the library run on the C library 2.28 or newer, whatever the machine that builds has (see cmake/glibc).
# HAS_DLSYM: the library has a dlsym of its own.  What nobody calls is left out, and with it what that would need of a
# newer C library (random_device: arc4random).
set(_foundryd_cmake ${CMAKE_CURRENT_LIST_DIR})

function(foundryd_static_runtime target)
  cmake_parse_arguments(RUNTIME "HAS_DLSYM" "" "" ${ARGN})
  if(FOUNDRYD_SANITIZE)
    return()  # a sanitizer has to see exceptions pass, and takes calls of the C library for itself
  endif()
  target_sources(${target} PRIVATE ${_foundryd_cmake}/glibc/moved.S ${_foundryd_cmake}/glibc/newer.cpp)
  if(RUNTIME_HAS_DLSYM)
    set_source_files_properties(${_foundryd_cmake}/glibc/moved.S PROPERTIES COMPILE_DEFINITIONS FOUNDRYD_HAS_DLSYM)
  endif()
  # No definition of it may be the one of the process.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-gnu-unique>)
  # Nothing of the runtime is shown to other libraries.  Where functions moved from has to be named, though nothing is
  # there any more, since an older C library still has them there.
  target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc -Wl,--gc-sections -Wl,--exclude-libs,ALL)
  target_link_libraries(${target} PRIVATE
    -Wl,--push-state,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2 -Wl,--pop-state)
endfunction()

# A Python module shows its initialiser and nothing of what its headers define.
function(foundryd_python_exports target)
  target_link_options(${target} PRIVATE -Wl,--version-script=${_foundryd_cmake}/module.map)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${_foundryd_cmake}/module.map)
endfunction()
