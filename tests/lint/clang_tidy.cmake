# Runs clang-tidy with the checks of .clang-tidy over all headers, and fails for any finding:
#
#   cmake -DSOURCE=<mezzo> -DTORCH=<libtorch> -DCLANG_TIDY=<clang-tidy> -DBUILD=<build directory> [-DMPI_INCLUDES=<directory>;...]
#         -P clang_tidy.cmake
#
# All headers are one translation unit, so that libtorch's are parsed once. Headers that need nvcc, or an MPI that is not installed,
# are left out.
file(GLOB_RECURSE headers RELATIVE "${SOURCE}/include" "${SOURCE}/include/mezzo/*.h")
list(FILTER headers EXCLUDE REGEX "/kernels/cuda/")
if(NOT MPI_INCLUDES)
  list(FILTER headers EXCLUDE REGEX "/distributed/(detail/)?mpi_")
endif()
list(LENGTH headers count)
if(count LESS 100)
  message(FATAL_ERROR "${SOURCE}/include has only ${count} headers: is SOURCE mezzo's source directory?")
endif()
list(TRANSFORM headers REPLACE "(.+)" "#include <\\1>")
list(JOIN headers "\n" unit)
file(WRITE "${BUILD}/every_header.cpp" "${unit}\n")
set(includes)
foreach(directory IN ITEMS "${TORCH}/include" "${TORCH}/include/torch/csrc/api/include" LISTS MPI_INCLUDES)
  list(APPEND includes -isystem "${directory}")
endforeach()
execute_process(
  COMMAND "${CLANG_TIDY}" --quiet "--config-file=${SOURCE}/.clang-tidy" "--header-filter=^${SOURCE}/include/mezzo/"
          "--warnings-as-errors=*" "${BUILD}/every_header.cpp" --
          -std=c++20 -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX "-I${SOURCE}/include" ${includes}
  RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "clang-tidy has findings (above). A NOLINT needs its reason beside it.")
endif()
