# Finds libtorch and provides the target mezzo::libtorch, in mezzo's own build and in its installed package.
#
#   Torch_DIR, CMAKE_PREFIX_PATH   where libtorch is (a libtorch archive, or the folder `torch` of a Python wheel)
#   MEZZO_CUDA                     AUTO (default), ON or OFF: whether to use libtorch's CUDA half
#
# Sets MEZZO_TORCH_VERSION, MEZZO_TORCH_PREFIX, MEZZO_TORCH_CUDA (whether mezzo::libtorch carries CUDA) and, where it
# does not, MEZZO_TORCH_CUDA_WHY_NOT in words.
#
# find_package(Torch) of a CUDA wheel stops with a fatal error where there is no CUDA toolkit, and its libraries do
# not link where CUDA's own (cuDNN, NCCL, ...) are missing. The CPU half works all the same, so mezzo::libtorch is
# libtorch_cpu and c10 alone there.

set(MEZZO_CUDA "AUTO" CACHE STRING "Use libtorch's CUDA half and mezzo's CUDA kernels: AUTO, ON or OFF")
set_property(CACHE MEZZO_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MEZZO_MINIMUM_TORCH_VERSION 2.4)

# The libraries that LIBRARY wants and the loader cannot find.
function(mezzo_missing_libraries library out)
  execute_process(COMMAND ldd "${library}" OUTPUT_VARIABLE listing ERROR_QUIET)
  string(REGEX MATCHALL "[^ \t\n]+ => not found" missing "${listing}")
  list(TRANSFORM missing REPLACE " => not found" "")
  list(FILTER missing EXCLUDE REGEX "^libcuda\\.so")  # the driver's: not needed to build
  set(${out} "${missing}" PARENT_SCOPE)
endfunction()

# The architectures to build kernels for, as TORCH_CUDA_ARCH_LIST has them: the user's choice, else those of the GPUs
# in this machine, else every one since tensor cores came that this nvcc accepts. (libtorch's own default begins with
# sm_50, which nvcc 13 refuses.)
function(mezzo_cuda_architectures out)
  if(DEFINED TORCH_CUDA_ARCH_LIST)
    set(list "${TORCH_CUDA_ARCH_LIST}")
  elseif(DEFINED ENV{TORCH_CUDA_ARCH_LIST})
    set(list "$ENV{TORCH_CUDA_ARCH_LIST}")
  else()
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE list ERROR_QUIET RESULT_VARIABLE failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" list "${list}")
    if(failed OR NOT list)
      set(list "")
      execute_process(COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
      foreach(arch IN ITEMS 7.0 7.5 8.0 8.6 8.9 9.0 10.0 12.0)
        string(REPLACE "." "" digits ${arch})
        if(known MATCHES "compute_${digits}(\n|$)")
          list(APPEND list ${arch})
        endif()
      endforeach()
    endif()
    list(REMOVE_DUPLICATES list)
  endif()
  set(${out} "${list}" PARENT_SCOPE)
endfunction()

# Why CUDA cannot be used with the libtorch at PREFIX, in words; empty where it can.
function(mezzo_why_not_cuda prefix out)
  set(${out} "" PARENT_SCOPE)
  if(MEZZO_CUDA STREQUAL "OFF")
    set(${out} "MEZZO_CUDA is OFF" PARENT_SCOPE)
  elseif(NOT EXISTS "${prefix}/lib/libtorch_cuda.so")
    set(${out} "this libtorch was built without CUDA" PARENT_SCOPE)
  elseif(NOT CUDAToolkit_FOUND)
    set(${out} "no CUDA toolkit was found (nvcc on PATH, or CUDAToolkit_ROOT)" PARENT_SCOPE)
  else()
    mezzo_missing_libraries("${prefix}/lib/libtorch_cuda.so" missing)
    if(missing)
      list(JOIN missing ", " missing)
      set(${out} "libtorch_cuda.so lacks ${missing}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# libtorch_cpu and c10 of PREFIX. Operators register themselves when the library loads, so it is linked even where
# no symbol of it is named.
function(mezzo_add_cpu_libtorch prefix)
  add_library(mezzo::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(mezzo::libtorch SYSTEM INTERFACE
    "${prefix}/include" "${prefix}/include/torch/csrc/api/include")
  target_link_libraries(mezzo::libtorch INTERFACE
    "-Wl,--push-state,--no-as-needed" "${prefix}/lib/libtorch_cpu.so" "${prefix}/lib/libc10.so" "-Wl,--pop-state")
endfunction()

if(NOT TARGET mezzo::libtorch)
  if(NOT TARGET torch)
    find_path(Torch_DIR TorchConfig.cmake PATH_SUFFIXES share/cmake/Torch torch/share/cmake/Torch)
    if(NOT Torch_DIR)
      message(FATAL_ERROR
        "mezzo needs libtorch ${MEZZO_MINIMUM_TORCH_VERSION} or newer and found none. Set CMAKE_PREFIX_PATH to it: an "
        "unpacked libtorch archive, or what `python3 -c 'import torch; print(torch.utils.cmake_prefix_path)'` prints. "
        "In mezzo's own checkout, ./bootstrap downloads one.")
    endif()
  endif()
  get_filename_component(MEZZO_TORCH_PREFIX "${Torch_DIR}/../../.." ABSOLUTE)
  file(STRINGS "${Torch_DIR}/TorchConfigVersion.cmake" MEZZO_TORCH_VERSION REGEX "set\\(PACKAGE_VERSION ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" MEZZO_TORCH_VERSION "${MEZZO_TORCH_VERSION}")
  if(MEZZO_TORCH_VERSION VERSION_LESS MEZZO_MINIMUM_TORCH_VERSION)
    message(FATAL_ERROR "mezzo needs libtorch ${MEZZO_MINIMUM_TORCH_VERSION} or newer; ${MEZZO_TORCH_PREFIX} holds "
                        "${MEZZO_TORCH_VERSION}.")
  endif()

  find_package(CUDAToolkit QUIET)
  if(TARGET torch)
    if(NOT TARGET torch_cuda)
      set(MEZZO_TORCH_CUDA_WHY_NOT "the libtorch that this project found was built without CUDA")
    endif()
  else()
    mezzo_why_not_cuda("${MEZZO_TORCH_PREFIX}" MEZZO_TORCH_CUDA_WHY_NOT)
    if(NOT MEZZO_TORCH_CUDA_WHY_NOT)
      mezzo_cuda_architectures(TORCH_CUDA_ARCH_LIST)
      find_package(Torch REQUIRED)
    endif()
  endif()
  if(TARGET torch)
    add_library(mezzo::libtorch INTERFACE IMPORTED GLOBAL)
    target_link_libraries(mezzo::libtorch INTERFACE "-Wl,--no-as-needed" ${TORCH_LIBRARIES} "-Wl,--as-needed")
  else()
    mezzo_add_cpu_libtorch("${MEZZO_TORCH_PREFIX}")
  endif()

  if(NOT MEZZO_TORCH_CUDA_WHY_NOT)
    set(MEZZO_TORCH_CUDA TRUE)
    message(STATUS "mezzo: libtorch ${MEZZO_TORCH_VERSION} with CUDA, in ${MEZZO_TORCH_PREFIX}")
  elseif(MEZZO_CUDA STREQUAL "ON")
    message(FATAL_ERROR "mezzo: MEZZO_CUDA is ON, but ${MEZZO_TORCH_CUDA_WHY_NOT}.")
  else()
    set(MEZZO_TORCH_CUDA FALSE)
    message(STATUS
      "mezzo: libtorch ${MEZZO_TORCH_VERSION}, CPU only (${MEZZO_TORCH_CUDA_WHY_NOT}), in ${MEZZO_TORCH_PREFIX}")
  endif()
endif()
