# mezzo::mpi: mezzo::mezzo and MPI, for mezzo/distributed/mpi_backend.h.
#
#   MEZZO_USE_MPI      whether to look for MPI:
#     AUTO (default)  yes; in a subdirectory of another project, only if that project has found MPI
#     ON              yes, and it is an error if MPI cannot be used
#     OFF             no
#   MPI_HOME, MPI_CXX_COMPILER   FindMPI's variables

set(MEZZO_USE_MPI "AUTO" CACHE STRING "Use MPI: AUTO, ON or OFF")
set_property(CACHE MEZZO_USE_MPI PROPERTY STRINGS AUTO ON OFF)

# Finds MPI. MEZZO_MPI_NOT_FOUND_REASON is empty if it was found.
macro(mezzo_find_mpi)
  set(MEZZO_MPI_NOT_FOUND_REASON "")
  if(NOT MEZZO_USE_MPI STREQUAL "OFF" AND NOT MPI_CXX_FOUND)
    # mezzo::mpi is global, for projects that add mezzo as a subdirectory, so MPI::MPI_CXX must be global too.
    set(mezzo_targets_global "${CMAKE_FIND_PACKAGE_TARGETS_GLOBAL}")
    set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
    find_package(MPI QUIET COMPONENTS CXX)
    set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL "${mezzo_targets_global}")
  endif()
  if(MEZZO_USE_MPI STREQUAL "OFF")
    set(MEZZO_MPI_NOT_FOUND_REASON "MEZZO_USE_MPI is OFF")
  elseif(NOT MPI_CXX_FOUND)  # FindMPI defines the target MPI::MPI_CXX even then
    set(MEZZO_MPI_NOT_FOUND_REASON "no MPI was found: neither mpicxx on PATH nor MPI_HOME")
  endif()
endmacro()

function(mezzo_add_mpi)
  add_library(mezzo::mpi INTERFACE IMPORTED GLOBAL)
  # Without MPI's former C++ bindings.
  target_compile_definitions(mezzo::mpi INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(mezzo::mpi INTERFACE mezzo::mezzo MPI::MPI_CXX)
endfunction()
