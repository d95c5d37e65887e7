# mezzo::mpi: mezzo::mezzo and MPI, for the backend of c10d that stands on it.
#
#   MEZZO_USE_MPI      whether to look for MPI:
#     AUTO (default)  yes; as a part of another project, only where that has found MPI before
#     ON              or stop and say why it cannot be used
#     OFF             no
#   MPI_HOME, MPI_CXX_COMPILER   where MPI is, as FindMPI has it
#
# mezzo calls MPI's C interface from C++, so no other language is needed.

set(MEZZO_USE_MPI "AUTO" CACHE STRING "Use MPI: AUTO, ON or OFF")
set_property(CACHE MEZZO_USE_MPI PROPERTY STRINGS AUTO ON OFF)

# Finds MPI; MEZZO_MPI_NOT_FOUND_REASON says in words why not, and is empty where it was found.
macro(mezzo_find_mpi)
  set(MEZZO_MPI_NOT_FOUND_REASON "")
  if(NOT MEZZO_USE_MPI STREQUAL "OFF" AND NOT MPI_CXX_FOUND)
    # mezzo::mpi is global, for a project that adds mezzo as a subdirectory: so must be what it links.
    set(mezzo_targets_global "${CMAKE_FIND_PACKAGE_TARGETS_GLOBAL}")
    set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
    find_package(MPI QUIET COMPONENTS CXX)
    set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL "${mezzo_targets_global}")
  endif()
  if(MEZZO_USE_MPI STREQUAL "OFF")
    set(MEZZO_MPI_NOT_FOUND_REASON "MEZZO_USE_MPI is OFF")
  elseif(NOT MPI_CXX_FOUND)  # The target MPI::MPI_CXX is there all the same: FindMPI makes it before it looks.
    set(MEZZO_MPI_NOT_FOUND_REASON "no MPI was found: neither mpicxx on PATH nor MPI_HOME")
  endif()
endmacro()

function(mezzo_add_mpi)
  add_library(mezzo::mpi INTERFACE IMPORTED GLOBAL)
  # The C++ bindings that old versions of MPI had, and that libraries still bring along.
  target_compile_definitions(mezzo::mpi INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(mezzo::mpi INTERFACE mezzo::mezzo MPI::MPI_CXX)
endfunction()
