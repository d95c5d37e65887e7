# Configures mezzo on a machine without an optional dependency, and checks the messages of the configuration:
#
#   cmake -DSOURCE=<mezzo> -DTORCH=<libtorch> -DBUILD=<build directory> -DDEPENDENCY=<name> -DCOMPILER=<g++> -DGENERATOR=<name>
#         -DMAKE_PROGRAM=<ninja> -P configure_without.cmake
#
# CMake searches a directory with links to all tools of this machine except those of the dependency. CMAKE_DISABLE_FIND_PACKAGE_<name>
# would test less: it does not run the find module at all.

# For each dependency: a regex of the tools to hide, a regex that the output must match, and one that it must not.
set(hide_mpi "^(mpi|ompi|orte|opal|hydra|pkg-config|pkgconf|x86_64-linux-gnu-pkg)")
set(expect_mpi "mezzo: without mezzo::mpi \\(no MPI was found: neither mpicxx on PATH nor MPI_HOME\\)")
set(reject_mpi "mezzo::mpi with MPI")  # regression test: FindMPI defines its target before it looks
set(hide_mpiexec "^(mpiexec|mpirun|orterun)")
set(expect_mpiexec "mezzo: multi-process tests are disabled: mpiexec was not found")
set(hide_cuda "^(nvcc|nvidia-smi)")
set(expect_cuda "CPU only \\((no CUDA toolkit was found: neither nvcc on PATH nor CUDAToolkit_ROOT|this libtorch was built without CUDA)\\)")
set(reject_cuda "mezzo::(nccl|cuda) with")
set(hide_ccache "ccache")
set(expect_ccache "Configuring done")
set(hide_git "^git")
set(expect_git "Configuring done")
set(hide_clang-format "^clang")
set(expect_clang-format "mezzo: test Lint.ClangFormat is disabled: clang-format 14 was not found")
set(hide_python "^python")
set(expect_python "mezzo: tests that need Python are disabled: python3 was not found")

if(NOT DEFINED hide_${DEPENDENCY})
  message(FATAL_ERROR "unknown DEPENDENCY: ${DEPENDENCY}")
endif()

set(machine "${BUILD}/machine")
file(REMOVE_RECURSE "${BUILD}")
file(MAKE_DIRECTORY "${machine}/bin")
string(REPLACE ":" ";" path "$ENV{PATH}")
foreach(directory IN LISTS path)
  file(GLOB tools "${directory}/[A-Za-z]*")  # not /usr/bin/[, which would open a nested list
  foreach(tool IN LISTS tools)
    cmake_path(GET tool FILENAME name)
    if(NOT name MATCHES "${hide_${DEPENDENCY}}" AND NOT EXISTS "${machine}/bin/${name}")
      file(CREATE_LINK "${tool}" "${machine}/bin/${name}" SYMBOLIC)
    endif()
  endforeach()
endforeach()
foreach(directory IN ITEMS include lib share)
  file(CREATE_LINK "/usr/${directory}" "${machine}/${directory}" SYMBOLIC)
endforeach()
set(ENV{PATH} "${machine}/bin")
set(ENV{PKG_CONFIG_LIBDIR} "${machine}/nothing")
foreach(variable IN ITEMS MPI_HOME CUDA_PATH CUDA_HOME CUDACXX CUDAToolkit_ROOT)
  unset(ENV{${variable}})
endforeach()
if(DEPENDENCY STREQUAL "cuda")
  list(APPEND options "-DCUDAToolkit_ROOT=${machine}")  # FindCUDAToolkit would find /usr/local/cuda without PATH
endif()
if(DEPENDENCY STREQUAL "python")
  list(APPEND options -DPython3_FIND_VIRTUALENV=STANDARD)
endif()

execute_process(
  COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${BUILD}/build" -G "${GENERATOR}"
          "-DCMAKE_PREFIX_PATH=${machine}" -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF "-DTorch_ROOT=${TORCH}"
          "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
          -DMEZZO_BUILD_BENCHMARKS=OFF ${options}
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "the configuration fails without ${DEPENDENCY}:\n${output}")
endif()
if(NOT output MATCHES "${expect_${DEPENDENCY}}")
  message(FATAL_ERROR "without ${DEPENDENCY}, expected \"${expect_${DEPENDENCY}}\" in:\n${output}")
endif()
if(reject_${DEPENDENCY} AND output MATCHES "${reject_${DEPENDENCY}}")
  message(FATAL_ERROR "without ${DEPENDENCY}, unexpected \"${CMAKE_MATCH_0}\" in:\n${output}")
endif()
if(DEPENDENCY STREQUAL "ccache")
  file(READ "${BUILD}/build/CMakeCache.txt" cache)
  if(NOT cache MATCHES "MEZZO_CCACHE:FILEPATH=MEZZO_CCACHE-NOTFOUND")
    message(FATAL_ERROR "ccache was found although this test hides it")
  endif()
endif()
message("${output}")
