# cmake -DSOURCE=folder -DTORCH=prefix -DCLANG_TIDY=program -DBUILD=folder [-DMPI_INCLUDES=folder;...] -P clang_tidy.cmake:
# stops where clang-tidy finds what .clang-tidy asks it to look for, in any header. All are one unit, so that libtorch is
# read once; what of nvcc and NCCL they need is not there.
file(GLOB_RECURSE headers RELATIVE "${SOURCE}/include" "${SOURCE}/include/mezzo/*.h")
list(FILTER headers EXCLUDE REGEX "/kernels/cuda/")
if(NOT MPI_INCLUDES)
  list(FILTER headers EXCLUDE REGEX "/distributed/(detail/)?mpi_")
endif()
list(LENGTH headers count)
if(count LESS 100)
  message(FATAL_ERROR "${SOURCE}/include has only ${count} headers: this looks in the wrong place")
endif()
list(TRANSFORM headers REPLACE "(.+)" "#include <\\1>")
list(JOIN headers "\n" unit)
file(WRITE "${BUILD}/every_header.cpp" "${unit}\n")
set(includes)
foreach(folder IN ITEMS "${TORCH}/include" "${TORCH}/include/torch/csrc/api/include" LISTS MPI_INCLUDES)
  list(APPEND includes -isystem "${folder}")
endforeach()
execute_process(
  COMMAND "${CLANG_TIDY}" --quiet "--config-file=${SOURCE}/.clang-tidy" "--header-filter=^${SOURCE}/include/mezzo/"
          "--warnings-as-errors=*" "${BUILD}/every_header.cpp" --
          -std=c++20 -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX "-I${SOURCE}/include" ${includes}
  RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "clang-tidy's findings stand above. A NOLINT takes a reason beside it.")
endif()
