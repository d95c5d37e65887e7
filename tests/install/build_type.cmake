# Checks that a project without CMAKE_BUILD_TYPE gets one warning that it is not optimized, and other projects get none:
#
#   cmake -DSOURCE=<mezzo> -DTORCH=<libtorch> -DBUILD=<build directory> -DCOMPILER=<g++> -DGENERATOR=<name> -DMAKE_PROGRAM=<ninja>
#         -P build_type.cmake

file(WRITE "${BUILD}/project/CMakeLists.txt"
  "cmake_minimum_required(VERSION 3.25)\nproject(user LANGUAGES CXX)\nadd_subdirectory(\"${SOURCE}\" mezzo)\n"
  "set(MEZZO_USE_CUDA OFF)\nadd_subdirectory(inner)\n")
file(WRITE "${BUILD}/project/inner/CMakeLists.txt" "include(\"${SOURCE}/cmake/MezzoTorch.cmake\")\n")

# expect_warnings(COUNT OPTION...)
function(expect_warnings expected)
  file(REMOVE_RECURSE "${BUILD}/build")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S "${BUILD}/project" -B "${BUILD}/build" -G "${GENERATOR}" -DMEZZO_USE_CUDA=OFF
            "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${TORCH}" ${ARGN}
    RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX MATCHALL "CMAKE_BUILD_TYPE is not set" found "${output}")
  list(LENGTH found count)
  if(failed OR NOT count EQUAL expected)
    message(FATAL_ERROR "with \"${ARGN}\": ${count} warnings instead of ${expected}:\n${output}")
  endif()
endfunction()

unset(ENV{CMAKE_BUILD_TYPE})
unset(ENV{CXXFLAGS})
expect_warnings(1)
expect_warnings(0 -DCMAKE_BUILD_TYPE=Release)
expect_warnings(0 -DCMAKE_CXX_FLAGS=-O2)
