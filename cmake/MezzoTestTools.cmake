# Finds the tools of mezzo's tests: GoogleTest, Python and mpiexec.
#
# GoogleTest is an installed package, or the sources in MEZZO_GOOGLETEST_SOURCE (a CMake or an environment variable).

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  set(MEZZO_GOOGLETEST_SOURCE "$ENV{MEZZO_GOOGLETEST_SOURCE}" CACHE PATH "GoogleTest's sources")
  if(NOT EXISTS "${MEZZO_GOOGLETEST_SOURCE}/CMakeLists.txt")
    message(FATAL_ERROR "mezzo's tests need GoogleTest: install libgtest-dev and libgmock-dev, or set "
                        "MEZZO_GOOGLETEST_SOURCE to its source directory.")
  endif()
  block()
    set(INSTALL_GTEST OFF)
    set(CMAKE_COMPILE_WARNING_AS_ERROR OFF)
    add_subdirectory("${MEZZO_GOOGLETEST_SOURCE}" "${PROJECT_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL SYSTEM)
  endblock()
endif()

# Without Python or mpiexec, the tests that need them are disabled.
find_package(Python3 COMPONENTS Interpreter)
if(NOT Python3_Interpreter_FOUND)
  message(STATUS "mezzo: tests that need Python are disabled: python3 was not found")
endif()
set(MEZZO_CAN_RUN_MPI FALSE)
if(TARGET mezzo::mpi AND MPIEXEC_EXECUTABLE)
  set(MEZZO_CAN_RUN_MPI TRUE)
elseif(TARGET mezzo::mpi)
  message(STATUS "mezzo: multi-process tests are disabled: mpiexec was not found")
endif()
