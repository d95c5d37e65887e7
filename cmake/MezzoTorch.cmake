# Finds libtorch and defines mezzo::libtorch, in mezzo's own build and in the installed package.
#
#   Torch_DIR, Torch_ROOT, CMAKE_PREFIX_PATH   where libtorch is: an unpacked archive, or the directory `torch` of a wheel
#   TORCH_CUDA_ARCH_LIST                       the GPU architectures to compile for, in libtorch's syntax: 8.0;9.0+PTX
#   MEZZO_USE_CUDA                             whether to use libtorch's CUDA libraries:
#     AUTO (default)  if none of them is missing
#     ON              yes, and it is an error if they cannot be used
#     OFF             no
#     COMPILE_ONLY    even if CUDA libraries are missing: programs link, but do not run
#
# The language CUDA, and with it nvcc, is enabled only by find_package(mezzo COMPONENTS cuda), by MEZZO_USE_CUDA=ON or COMPILE_ONLY, by a
# parent project, and in mezzo's own build. Otherwise libtorch's CUDA libraries are linked without it if none is missing, so that CUDA
# tensors work through ATen's kernels.
#
# Sets MEZZO_TORCH_CUDA (whether mezzo::libtorch has CUDA), MEZZO_TORCH_CUDA_NOT_FOUND_REASON if it does not, and TORCH_LIBRARIES to
# mezzo::libtorch if the project has not called find_package(Torch).
#
# find_package(Torch) of a CUDA wheel is a fatal error without a CUDA toolkit, and its libraries do not link if CUDA libraries (cuDNN,
# NCCL, ...) are missing. libtorch's CPU libraries work nevertheless: mezzo::libtorch is then libtorch_cpu and c10.

set(MEZZO_USE_CUDA "AUTO" CACHE STRING "Use libtorch's CUDA libraries: AUTO, ON, OFF or COMPILE_ONLY")
set_property(CACHE MEZZO_USE_CUDA PROPERTY STRINGS AUTO ON OFF COMPILE_ONLY)
set(MEZZO_MINIMUM_TORCH_VERSION 2.10)

# Sets Torch_DIR, MEZZO_TORCH_PREFIX and MEZZO_TORCH_VERSION.
macro(mezzo_find_torch)
  find_path(Torch_DIR TorchConfig.cmake HINTS ENV Torch_DIR ${Torch_ROOT} ENV Torch_ROOT
            PATH_SUFFIXES share/cmake/Torch Torch torch/share/cmake/Torch)
  if(NOT Torch_DIR)
    message(FATAL_ERROR
      "mezzo needs libtorch ${MEZZO_MINIMUM_TORCH_VERSION} or newer and found none. Set CMAKE_PREFIX_PATH to it: an "
      "unpacked libtorch archive, or what `python3 -c 'import torch; print(torch.utils.cmake_prefix_path)'` prints. "
      "In mezzo's own checkout, ./bootstrap downloads one.")
  endif()
  get_filename_component(MEZZO_TORCH_PREFIX "${Torch_DIR}/../../.." REALPATH)
  file(STRINGS "${Torch_DIR}/TorchConfigVersion.cmake" MEZZO_TORCH_VERSION REGEX "set\\(PACKAGE_VERSION ")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" MEZZO_TORCH_VERSION "${MEZZO_TORCH_VERSION}")
  if(MEZZO_TORCH_VERSION VERSION_LESS MEZZO_MINIMUM_TORCH_VERSION)
    message(FATAL_ERROR "mezzo needs libtorch ${MEZZO_MINIMUM_TORCH_VERSION} or newer; ${MEZZO_TORCH_PREFIX} has "
                        "${MEZZO_TORCH_VERSION}.")
  endif()
endmacro()

# Sets OUT to the dependencies of LIBRARY that the loader cannot find.
function(mezzo_get_missing_libraries library out)
  execute_process(COMMAND ldd "${library}" OUTPUT_VARIABLE listing ERROR_QUIET)
  string(REGEX MATCHALL "[^ \t\n]+ => not found" missing "${listing}")
  list(TRANSFORM missing REPLACE " => not found" "")
  list(FILTER missing EXCLUDE REGEX "^libcuda\\.so")  # the driver is not needed to build
  set(${out} "${missing}" PARENT_SCOPE)
endfunction()

# Sets OUT to the reason why CUDA cannot be used with this libtorch; empty if it can.
function(mezzo_get_cuda_not_found_reason needs_toolkit out)
  set(reason "")
  if(MEZZO_USE_CUDA STREQUAL "OFF")
    set(reason "MEZZO_USE_CUDA is OFF")
  elseif(NOT EXISTS "${MEZZO_TORCH_PREFIX}/lib/libtorch_cuda.so")
    set(reason "this libtorch was built without CUDA")
  elseif(needs_toolkit AND (NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE))
    set(reason "no CUDA toolkit was found: neither nvcc on PATH nor CUDAToolkit_ROOT")
  elseif(NOT MEZZO_USE_CUDA STREQUAL "COMPILE_ONLY")
    mezzo_get_missing_libraries("${MEZZO_TORCH_PREFIX}/lib/libtorch_cuda.so" missing)
    if(missing)
      list(JOIN missing ", " missing)
      set(reason "libtorch_cuda.so lacks ${missing}")
    endif()
  endif()
  set(${out} "${reason}" PARENT_SCOPE)
endfunction()

# Sets OUT to the architectures to compile for: TORCH_CUDA_ARCH_LIST, else those of this machine's GPUs, else those arguments that nvcc
# supports, with PTX of the newest for later GPUs. (libtorch's default includes sm_50, which nvcc 13 does not support.)
function(mezzo_get_cuda_architectures out)
  if(DEFINED TORCH_CUDA_ARCH_LIST)
    set(list "${TORCH_CUDA_ARCH_LIST}")
  elseif(DEFINED ENV{TORCH_CUDA_ARCH_LIST})
    set(list "$ENV{TORCH_CUDA_ARCH_LIST}")
  else()
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE installed ERROR_QUIET RESULT_VARIABLE failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" list "${installed}")
    if(failed OR NOT list)
      execute_process(COMMAND "${CUDAToolkit_NVCC_EXECUTABLE}" --list-gpu-arch OUTPUT_VARIABLE known)
      set(list "")
      foreach(architecture IN LISTS ARGN)
        string(REPLACE "." "" number ${architecture})
        if(known MATCHES "compute_${number}(\n|$)")
          list(APPEND list ${architecture})
        endif()
      endforeach()
      if(list)
        list(POP_BACK list newest)
        list(APPEND list ${newest}+PTX)
      endif()
    endif()
    list(REMOVE_DUPLICATES list)
  endif()
  string(REGEX REPLACE "[ ,]+" ";" list "${list}")
  set(${out} "${list}" PARENT_SCOPE)
endfunction()

# Sets OUT to the arguments in CMake's syntax: 8.0;9.0+PTX becomes 80-real;90.
function(mezzo_get_cmake_architectures out)
  set(list "")
  foreach(architecture IN LISTS ARGN)
    if(NOT architecture MATCHES "^([0-9]+)\\.([0-9]+[a-z]?)(\\+PTX)?$")
      message(FATAL_ERROR "mezzo: TORCH_CUDA_ARCH_LIST has ${architecture}; expected the form 9.0 or 9.0+PTX.")
    elseif(CMAKE_MATCH_3)
      list(APPEND list "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    else()
      list(APPEND list "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real")
    endif()
  endforeach()
  set(${out} "${list}" PARENT_SCOPE)
endfunction()

# Defines mezzo::libtorch from libtorch_cpu and c10, with the definitions of libtorch's own package.
function(mezzo_add_cpu_libtorch)
  file(READ "${Torch_DIR}/../Caffe2/Caffe2Targets.cmake" targets)
  string(REGEX MATCH "set_target_properties\\(torch_cpu PROPERTIES[^)]*INTERFACE_COMPILE_DEFINITIONS \"([^\"]*)\""
         definitions "${targets}")
  set(definitions "${CMAKE_MATCH_1}")
  file(READ "${Torch_DIR}/TorchConfig.cmake" config)
  string(REGEX MATCH "_GLIBCXX_USE_CXX11_ABI=[01]" cxx11_abi "${config}")  # wheels before 2.6 have the old ABI

  add_library(mezzo::libtorch INTERFACE IMPORTED GLOBAL)
  target_compile_definitions(mezzo::libtorch INTERFACE ${definitions} ${cxx11_abi})
  target_include_directories(mezzo::libtorch SYSTEM INTERFACE
    "${MEZZO_TORCH_PREFIX}/include" "${MEZZO_TORCH_PREFIX}/include/torch/csrc/api/include")
  # Operators are registered when the library loads, so it is linked even if no symbol of it is used.
  target_link_libraries(mezzo::libtorch INTERFACE
    "-Wl,--push-state,--no-as-needed" "${MEZZO_TORCH_PREFIX}/lib/libtorch_cpu.so"
    "${MEZZO_TORCH_PREFIX}/lib/libc10.so" "-Wl,--pop-state")
endfunction()

# Enables CUDA even if the C++ standard is 20, as with Conan's toolchain. CMake 3.25 would test nvcc 13 with C++20, which it believes to be
# unsupported, so its test project uses C++17.
macro(mezzo_enable_cuda)
  if(NOT CMAKE_CUDA_COMPILER_LOADED)
    set(mezzo_outer_cuda_standard "${CMAKE_CUDA_STANDARD}")
    set(mezzo_outer_variables "${CMAKE_TRY_COMPILE_PLATFORM_VARIABLES}")
    set(CMAKE_CUDA_STANDARD 17)
    list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES CMAKE_CUDA_STANDARD)
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD "${mezzo_outer_cuda_standard}")
    set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES "${mezzo_outer_variables}")
    if(NOT CMAKE_CUDA_STANDARD)
      unset(CMAKE_CUDA_STANDARD)
    endif()
  endif()
endmacro()

# Links libtorch's CUDA libraries. Their dependencies are resolved when the program starts.
function(mezzo_link_cuda_libraries)
  target_link_libraries(mezzo::libtorch INTERFACE
    "-Wl,--unresolved-symbols=ignore-in-shared-libs" "-Wl,--push-state,--no-as-needed"
    "${MEZZO_TORCH_PREFIX}/lib/libtorch_cuda.so" "${MEZZO_TORCH_PREFIX}/lib/libc10_cuda.so" "-Wl,--pop-state")
endfunction()

# Defines mezzo::libtorch for COMPILE_ONLY: libtorch's CUDA libraries without their dependencies.
macro(mezzo_add_compile_only_libtorch)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    mezzo_get_cuda_architectures(mezzo_architectures 8.0 9.0)
    mezzo_get_cmake_architectures(CMAKE_CUDA_ARCHITECTURES ${mezzo_architectures})
  endif()
  mezzo_enable_cuda()
  mezzo_add_cpu_libtorch()
  mezzo_link_cuda_libraries()
  target_link_libraries(mezzo::libtorch INTERFACE CUDA::cudart)
endmacro()

# Links libstdc++ before libtorch in all users of mezzo::libtorch. The libtorch.so of CUDA wheels exports functions of std::filesystem
# that use weak symbols which an older libstdc++ does not have. A program that resolves std::filesystem::remove_all to them, as on
# Debian 12, calls address 0.
function(mezzo_link_libstdcxx_first)
  include(CheckCXXSourceCompiles)
  check_cxx_source_compiles("#include <version>
#ifndef __GLIBCXX__
#error
#endif
int main() {}" MEZZO_USES_LIBSTDCXX)
  if(MEZZO_USES_LIBSTDCXX)
    # A link option precedes all libraries, including a ${TORCH_LIBRARIES} of the program.
    string(REPLACE "," "$<COMMA>" option "-Wl,--push-state,--no-as-needed,-lstdc++,--pop-state")
    target_link_options(mezzo::libtorch INTERFACE "$<HOST_LINK:${option}>")
  endif()
endfunction()

# Lets the linker search the dependencies of libtorch's CUDA libraries where the loader does: in the directories of their RPATH. By default
# it searches those of -rpath first, and a CUDA toolkit among them may have an older NCCL or cuDNN, without symbols that this libtorch
# uses.
function(mezzo_add_rpath_link_options)
  execute_process(COMMAND "${CMAKE_READELF}" -d "${MEZZO_TORCH_PREFIX}/lib/libtorch_cuda.so" OUTPUT_VARIABLE dynamic ERROR_QUIET)
  string(REGEX MATCH "\\(R(UN)?PATH\\)[^[]*\\[([^]]*)\\]" found "${dynamic}")
  string(REPLACE ":" ";" directories "${CMAKE_MATCH_2}")
  foreach(directory IN LISTS directories)
    string(REPLACE "$ORIGIN" "${MEZZO_TORCH_PREFIX}/lib" directory "${directory}")
    if(IS_DIRECTORY "${directory}")
      get_filename_component(directory "${directory}" REALPATH)
      target_link_options(mezzo::libtorch INTERFACE "$<HOST_LINK:-Wl$<COMMA>-rpath-link$<COMMA>${directory}>")
    endif()
  endforeach()
endfunction()

if(NOT TARGET mezzo::libtorch)
  mezzo_find_torch()
  find_package(CUDAToolkit QUIET)
  if(TARGET torch)  # the project has called find_package(Torch)
    set(MEZZO_TORCH_CUDA_NOT_FOUND_REASON "")
    if(NOT TARGET torch_cuda)
      set(MEZZO_TORCH_CUDA_NOT_FOUND_REASON "the libtorch that this project found was built without CUDA")
    else()
      mezzo_get_missing_libraries("${MEZZO_TORCH_PREFIX}/lib/libtorch_cuda.so" mezzo_missing)
      if(mezzo_missing AND NOT MEZZO_USE_CUDA STREQUAL "COMPILE_ONLY")
        list(JOIN mezzo_missing ", " mezzo_missing)
        message(WARNING
          "mezzo: this project's find_package(Torch) links libtorch's CUDA libraries, and libtorch_cuda.so lacks "
          "${mezzo_missing}: linking will fail. Remove find_package(Torch) (find_package(mezzo) sets "
          "TORCH_LIBRARIES), or install the wheel with its dependencies.")
      endif()
    endif()
  else()
    set(mezzo_enables_cuda FALSE)
    if(MEZZO_USE_CUDA MATCHES "^(ON|COMPILE_ONLY)$" OR "cuda" IN_LIST mezzo_FIND_COMPONENTS OR CMAKE_CUDA_COMPILER_LOADED
       OR MEZZO_DEVELOPER_BUILD)
      set(mezzo_enables_cuda TRUE)
    endif()
    mezzo_get_cuda_not_found_reason(${mezzo_enables_cuda} MEZZO_TORCH_CUDA_NOT_FOUND_REASON)
  endif()
  if(MEZZO_TORCH_CUDA_NOT_FOUND_REASON AND MEZZO_USE_CUDA MATCHES "^(ON|COMPILE_ONLY)$")
    message(FATAL_ERROR "mezzo: MEZZO_USE_CUDA is ${MEZZO_USE_CUDA}, but ${MEZZO_TORCH_CUDA_NOT_FOUND_REASON}.")
  endif()

  if(NOT TARGET torch AND MEZZO_TORCH_CUDA_NOT_FOUND_REASON)
    mezzo_add_cpu_libtorch()
  elseif(NOT TARGET torch AND NOT mezzo_enables_cuda)
    mezzo_add_cpu_libtorch()
    mezzo_link_cuda_libraries()
    # For programs that include c10/cuda.
    target_include_directories(mezzo::libtorch SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  elseif(NOT TARGET torch AND MEZZO_USE_CUDA STREQUAL "COMPILE_ONLY")
    mezzo_add_compile_only_libtorch()
  else()
    if(NOT TARGET torch)
      mezzo_get_cuda_architectures(TORCH_CUDA_ARCH_LIST 7.5 8.0 8.6 8.9 9.0 10.0 12.0)
      mezzo_enable_cuda()  # before find_package(Torch) does
      # mezzo::libtorch is global, for projects that add mezzo as a subdirectory, so its dependencies must be global too.
      set(mezzo_targets_global "${CMAKE_FIND_PACKAGE_TARGETS_GLOBAL}")
      set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
      find_package(Torch REQUIRED)
      set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL "${mezzo_targets_global}")
    endif()
    add_library(mezzo::libtorch INTERFACE IMPORTED GLOBAL)
    target_link_libraries(mezzo::libtorch INTERFACE ${TORCH_LIBRARIES})
  endif()

  mezzo_link_libstdcxx_first()
  if(NOT MEZZO_TORCH_CUDA_NOT_FOUND_REASON)
    mezzo_add_rpath_link_options()
  endif()
  set_target_properties(mezzo::libtorch PROPERTIES MEZZO_CUDA_NOT_FOUND_REASON "${MEZZO_TORCH_CUDA_NOT_FOUND_REASON}")
  target_compile_features(mezzo::libtorch INTERFACE cxx_std_20)  # as in the package of libtorch 2.15
  # libtorch was compiled by a g++ that mangles Tensor::const_data_ptr<T> as Clang did before 18.
  target_compile_options(mezzo::libtorch INTERFACE
    "$<$<AND:$<COMPILE_LANG_AND_ID:CXX,Clang>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,18>>:-fclang-abi-compat=17>")
  if(MEZZO_TORCH_CUDA_NOT_FOUND_REASON)
    message(STATUS
      "mezzo: libtorch ${MEZZO_TORCH_VERSION}, CPU only (${MEZZO_TORCH_CUDA_NOT_FOUND_REASON}), in ${MEZZO_TORCH_PREFIX}")
  else()
    message(STATUS "mezzo: libtorch ${MEZZO_TORCH_VERSION} with CUDA, in ${MEZZO_TORCH_PREFIX}")
  endif()
endif()

# For projects that link ${TORCH_LIBRARIES} without find_package(Torch).
if(NOT TORCH_LIBRARIES)
  set(TORCH_LIBRARIES mezzo::libtorch)
endif()

# The headers are compiled with the project's flags. Warns once, even if several directories find mezzo.
get_property(mezzo_build_type_reported GLOBAL PROPERTY MEZZO_BUILD_TYPE_REPORTED)
get_property(mezzo_is_multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
if(NOT mezzo_build_type_reported AND NOT mezzo_is_multi_config AND NOT "${CMAKE_CXX_FLAGS}" MATCHES "-O[1-9sgfz]")
  if(NOT CMAKE_BUILD_TYPE)
    message(WARNING "mezzo: CMAKE_BUILD_TYPE is not set, so this project and mezzo's kernels in it are compiled without "
                    "optimization: optimizer steps take six times as long. Configure with -DCMAKE_BUILD_TYPE=Release.")
  elseif(CMAKE_BUILD_TYPE STREQUAL "Debug")
    message(STATUS "mezzo: a Debug build does not optimize mezzo's kernels; use RelWithDebInfo or mezzo::compiled")
  endif()
  set_property(GLOBAL PROPERTY MEZZO_BUILD_TYPE_REPORTED TRUE)
endif()

# A property of the target, since another directory of the project may have defined it.
get_target_property(MEZZO_TORCH_CUDA_NOT_FOUND_REASON mezzo::libtorch MEZZO_CUDA_NOT_FOUND_REASON)
if(MEZZO_TORCH_CUDA_NOT_FOUND_REASON)
  set(MEZZO_TORCH_CUDA FALSE)
else()
  set(MEZZO_TORCH_CUDA TRUE)
endif()
