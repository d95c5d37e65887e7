# What mezzo's own tests run with.
#
# GoogleTest: an installed package, or the sources in MEZZO_GOOGLETEST_SOURCE (a variable of CMake or of the environment)
# on a machine that has none.

find_package(GTest QUIET)
if(NOT GTest_FOUND)
  set(MEZZO_GOOGLETEST_SOURCE "$ENV{MEZZO_GOOGLETEST_SOURCE}" CACHE PATH "GoogleTest's sources")
  if(NOT EXISTS "${MEZZO_GOOGLETEST_SOURCE}/CMakeLists.txt")
    message(FATAL_ERROR "mezzo's tests need GoogleTest: install libgtest-dev and libgmock-dev, or set "
                        "MEZZO_GOOGLETEST_SOURCE to a folder with its sources.")
  endif()
  set(INSTALL_GTEST OFF)
  add_subdirectory("${MEZZO_GOOGLETEST_SOURCE}" "${PROJECT_BINARY_DIR}/googletest" EXCLUDE_FROM_ALL SYSTEM)
endif()

# Python and mpiexec: what needs them is left out where they are missing, and that is said.
find_package(Python3 COMPONENTS Interpreter)
if(NOT Python3_Interpreter_FOUND)
  message(STATUS "mezzo: tests that run Python are left out: no python3")
endif()
set(MEZZO_CAN_RUN_MPI FALSE)
if(TARGET mezzo::mpi AND MPIEXEC_EXECUTABLE)
  set(MEZZO_CAN_RUN_MPI TRUE)
elseif(TARGET mezzo::mpi)
  message(STATUS "mezzo: tests of several processes are left out: no mpiexec")
endif()
