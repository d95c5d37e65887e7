# Configures mezzo on a machine that lacks an optional part, and checks what the configuration says of it:
#
#   cmake -DSOURCE=<mezzo> -DTORCH=<libtorch> -DBUILD=<scratch folder> -DPART=<part> -DCOMPILER=<g++>
#         -DGENERATOR=<CMake's name> -DMAKE_PROGRAM=<ninja> -P configure_without.cmake
#
# The machine is this one with the part's tools taken off the path: a folder that links to every tool but those, and that
# is all CMake searches. CMAKE_DISABLE_FIND_PACKAGE_<part> is not the same: with it a find module does not run at all,
# and what the module does where it finds nothing goes untested.

# What is hidden (expressions over names of tools), and what the configuration has to say, or must not.
set(tools_of_mpi "^(mpi|ompi|orte|opal|hydra|pkg-config|pkgconf|x86_64-linux-gnu-pkg)")
set(says_mpi "mezzo: without mezzo::mpi \\(no MPI was found: neither mpicxx on PATH nor MPI_HOME\\)")
set(never_mpi "mezzo::mpi with MPI")  # which was said once, and programs did not build
set(tools_of_mpiexec "^(mpiexec|mpirun|orterun)")
set(says_mpiexec "mezzo: tests of several processes are left out: no mpiexec")
# Without a CUDA toolkit NCCL, whose header lies among the toolkit's, is not looked for.
set(tools_of_cuda "^(nvcc|nvidia-smi)")
set(says_cuda "CPU only \\((no CUDA toolkit was found: neither nvcc on PATH nor CUDAToolkit_ROOT|this libtorch was built without CUDA)\\)")
set(never_cuda "mezzo::(nccl|cuda) with")
set(tools_of_ccache "ccache")
set(says_ccache "Configuring done")
set(tools_of_git "^git")
set(says_git "Configuring done")
set(tools_of_clang-format "^clang")
set(says_clang-format "mezzo: the layout of the sources is not checked: no clang-format 14")
set(tools_of_python "^python")
set(says_python "mezzo: tests that run Python are left out: no python3")

if(NOT DEFINED tools_of_${PART})
  message(FATAL_ERROR "PART is ${PART}, which this script does not know")
endif()

# A machine without the part.
set(machine "${BUILD}/machine")
file(REMOVE_RECURSE "${BUILD}")
file(MAKE_DIRECTORY "${machine}/bin")
string(REPLACE ":" ";" path "$ENV{PATH}")
foreach(folder IN LISTS path)
  file(GLOB tools "${folder}/[A-Za-z]*")  # not /usr/bin/[, which would open a list in the list
  foreach(tool IN LISTS tools)
    cmake_path(GET tool FILENAME name)
    if(NOT name MATCHES "${tools_of_${PART}}" AND NOT EXISTS "${machine}/bin/${name}")
      file(CREATE_LINK "${tool}" "${machine}/bin/${name}" SYMBOLIC)
    endif()
  endforeach()
endforeach()
foreach(folder IN ITEMS include lib share)
  file(CREATE_LINK "/usr/${folder}" "${machine}/${folder}" SYMBOLIC)
endforeach()
set(ENV{PATH} "${machine}/bin")
set(ENV{PKG_CONFIG_LIBDIR} "${machine}/nothing")
foreach(variable IN ITEMS MPI_HOME CUDA_PATH CUDA_HOME CUDACXX CUDAToolkit_ROOT)
  unset(ENV{${variable}})
endforeach()
if(PART STREQUAL "cuda")
  list(APPEND options "-DCUDAToolkit_ROOT=${machine}")  # or /usr/local/cuda would be found without a path to it
endif()
if(PART STREQUAL "python")
  list(APPEND options -DPython3_FIND_VIRTUALENV=STANDARD)
endif()

execute_process(
  COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${BUILD}/build" -G "${GENERATOR}"
          "-DCMAKE_PREFIX_PATH=${machine}" -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF "-DTorch_ROOT=${TORCH}"
          "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
          -DMEZZO_BUILD_BENCHMARKS=OFF ${options}
  OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "without ${PART} the configuration stops:\n${said}")
endif()
if(NOT said MATCHES "${says_${PART}}")
  message(FATAL_ERROR "without ${PART} the configuration should say \"${says_${PART}}\" and says:\n${said}")
endif()
if(never_${PART} AND said MATCHES "${never_${PART}}")
  message(FATAL_ERROR "without ${PART} the configuration says \"${CMAKE_MATCH_0}\":\n${said}")
endif()
if(PART STREQUAL "ccache")
  file(READ "${BUILD}/build/CMakeCache.txt" cache)
  if(NOT cache MATCHES "MEZZO_CCACHE:FILEPATH=MEZZO_CCACHE-NOTFOUND")
    message(FATAL_ERROR "ccache was to be hidden and was found; this test tests nothing")
  endif()
endif()
message("${said}")
