# Checks that CUDA is enabled with a toolchain file that sets C++20, as Conan's does:
#
#   cmake -DSOURCE=<mezzo> -DTORCH=<libtorch> -DBUILD=<build directory> -DCOMPILER=<g++> -DGENERATOR=<name> -DMAKE_PROGRAM=<ninja>
#         -P toolchain.cmake

file(WRITE "${BUILD}/toolchain.cmake" "set(CMAKE_CXX_STANDARD 20)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\nset(CMAKE_CXX_COMPILER \"${COMPILER}\")\n")
file(WRITE "${BUILD}/project/CMakeLists.txt"
  "cmake_minimum_required(VERSION 3.25)\nproject(user LANGUAGES CXX)\nadd_subdirectory(\"${SOURCE}\" mezzo)\n")
file(REMOVE_RECURSE "${BUILD}/build")
execute_process(
  COMMAND ${CMAKE_COMMAND} -S "${BUILD}/project" -B "${BUILD}/build" -G "${GENERATOR}" -DMEZZO_USE_CUDA=COMPILE_ONLY
          "-DCMAKE_TOOLCHAIN_FILE=${BUILD}/toolchain.cmake" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
          "-DCMAKE_PREFIX_PATH=${TORCH}" -DCMAKE_BUILD_TYPE=Release
  RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(failed OR NOT output MATCHES "with CUDA, in")
  message(FATAL_ERROR "CUDA was not found with a C++20 toolchain:\n${output}")
endif()
