# cmake -DSOURCE=... -DTORCH=... -DBUILD=... -DCOMPILER=... -DGENERATOR=... -DMAKE_PROGRAM=... -P build_type.cmake
#
# A project without CMAKE_BUILD_TYPE is told once that it is not optimised, and others are not.

file(WRITE "${BUILD}/project/CMakeLists.txt"
  "cmake_minimum_required(VERSION 3.25)\nproject(user LANGUAGES CXX)\nadd_subdirectory(\"${SOURCE}\" mezzo)\n"
  "set(MEZZO_USE_CUDA OFF)\nadd_subdirectory(inner)\n")
file(WRITE "${BUILD}/project/inner/CMakeLists.txt" "include(\"${SOURCE}/cmake/MezzoTorch.cmake\")\n")

# configure(WARNINGS OPTION...): how often the warning is to come.
function(configure warnings)
  file(REMOVE_RECURSE "${BUILD}/build")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S "${BUILD}/project" -B "${BUILD}/build" -G "${GENERATOR}" -DMEZZO_USE_CUDA=OFF
            "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${TORCH}" ${ARGN}
    RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
  string(REGEX MATCHALL "CMAKE_BUILD_TYPE is not set" found "${said}")
  list(LENGTH found count)
  if(failed OR NOT count EQUAL warnings)
    message(FATAL_ERROR "with \"${ARGN}\" the warning came ${count} times, and ${warnings} are right:\n${said}")
  endif()
endfunction()

unset(ENV{CMAKE_BUILD_TYPE})
unset(ENV{CXXFLAGS})
configure(1)
configure(0 -DCMAKE_BUILD_TYPE=Release)
configure(0 -DCMAKE_CXX_FLAGS=-O2)
