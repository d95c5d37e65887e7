# mezzo::mezzo, the headers and libtorch, builds with the host compiler alone; mezzo::cuda adds the kernels,
# mezzo::mpi adds MPI, mezzo::nccl what libtorch's NCCL process group is compiled with; mezzo::compiled is mezzo::mezzo
# with its loops in a library.

add_library(mezzo INTERFACE)
add_library(mezzo::mezzo ALIAS mezzo)
target_compile_features(mezzo INTERFACE cxx_std_20)
target_include_directories(mezzo INTERFACE
  "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
target_link_libraries(mezzo INTERFACE mezzo::libtorch ${CMAKE_DL_LIBS})

if(MEZZO_TORCH_CUDA AND (PROJECT_IS_TOP_LEVEL OR "CUDA" IN_LIST mezzo_outer_languages))
  include(MezzoCuda)
  mezzo_add_cuda("${PROJECT_SOURCE_DIR}/include")
elseif(MEZZO_TORCH_CUDA)
  message(STATUS "mezzo: without mezzo::cuda, since the project that adds mezzo has not enabled CUDA before")
endif()

if(TARGET mezzo::cuda)
  include(MezzoNccl)
  mezzo_find_nccl()
  if(NOT MEZZO_NCCL_WHY_NOT)
    mezzo_add_nccl()
    message(STATUS "mezzo: mezzo::nccl with ${NCCL_INCLUDE_DIR}/nccl.h")
  else()
    message(STATUS "mezzo: without mezzo::nccl (${MEZZO_NCCL_WHY_NOT})")
  endif()
endif()

if(TARGET mezzo::libtorch)
  include(MezzoCompiled)
  mezzo_add_compiled_targets("${PROJECT_SOURCE_DIR}/include")
endif()

include(MezzoMpi)
if(PROJECT_IS_TOP_LEVEL OR MEZZO_MPI STREQUAL "ON" OR TARGET MPI::MPI_CXX)
  mezzo_find_mpi()
  if(NOT MEZZO_MPI_WHY_NOT)
    mezzo_add_mpi()
    message(STATUS "mezzo: mezzo::mpi with MPI ${MPI_CXX_VERSION}")
  elseif(MEZZO_MPI STREQUAL "ON")
    message(FATAL_ERROR "mezzo: MEZZO_MPI is ON, but ${MEZZO_MPI_WHY_NOT}.")
  else()
    message(STATUS "mezzo: without mezzo::mpi (${MEZZO_MPI_WHY_NOT})")
  endif()
endif()
