# cmake -DSOURCE=... -DTORCH=... -DBUILD=... -DCOMPILER=... -DGENERATOR=... -DMAKE_PROGRAM=... -P toolchain.cmake
#
# With a toolchain that asks for C++20, as Conan's does, CUDA is found and used.

file(WRITE "${BUILD}/toolchain.cmake" "set(CMAKE_CXX_STANDARD 20)\nset(CMAKE_CXX_STANDARD_REQUIRED ON)\nset(CMAKE_CXX_COMPILER \"${COMPILER}\")\n")
file(WRITE "${BUILD}/project/CMakeLists.txt"
  "cmake_minimum_required(VERSION 3.25)\nproject(user LANGUAGES CXX)\nadd_subdirectory(\"${SOURCE}\" mezzo)\n")
file(REMOVE_RECURSE "${BUILD}/build")
execute_process(
  COMMAND ${CMAKE_COMMAND} -S "${BUILD}/project" -B "${BUILD}/build" -G "${GENERATOR}" -DMEZZO_USE_CUDA=COMPILE_ONLY
          "-DCMAKE_TOOLCHAIN_FILE=${BUILD}/toolchain.cmake" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
          "-DCMAKE_PREFIX_PATH=${TORCH}" -DCMAKE_BUILD_TYPE=Release
  RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(failed OR NOT said MATCHES "with CUDA, in")
  message(FATAL_ERROR "With a toolchain for C++20 CUDA is not found:\n${said}")
endif()
