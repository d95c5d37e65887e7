# mezzo::nccl: mezzo::cuda and the definitions of libtorch's NCCL process group (c10d/ProcessGroupNCCL.hpp).
# A CUDA libtorch contains NCCL, but not its header.
#
#   NCCL_INCLUDE_DIR   the directory of nccl.h, if it is neither with CUDA's headers nor in a wheel next to libtorch's

# Finds nccl.h. MEZZO_NCCL_NOT_FOUND_REASON is empty if it was found.
macro(mezzo_find_nccl)
  set(MEZZO_NCCL_NOT_FOUND_REASON "")
  if(NOT TARGET mezzo::cuda)
    set(MEZZO_NCCL_NOT_FOUND_REASON "mezzo::cuda is not available")
  else()
    find_path(NCCL_INCLUDE_DIR nccl.h
      HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} "${MEZZO_TORCH_PREFIX}/../nvidia/nccl/include"
      DOC "The directory of nccl.h")
    if(NOT NCCL_INCLUDE_DIR)
      set(MEZZO_NCCL_NOT_FOUND_REASON
          "no nccl.h was found with CUDA's headers or in a wheel nvidia-nccl-cu13 next to libtorch; set NCCL_INCLUDE_DIR")
    endif()
  endif()
endmacro()

function(mezzo_add_nccl)
  add_library(mezzo::nccl INTERFACE IMPORTED GLOBAL)
  target_compile_definitions(mezzo::nccl INTERFACE USE_C10D_NCCL)
  target_include_directories(mezzo::nccl INTERFACE "${NCCL_INCLUDE_DIR}")
  target_link_libraries(mezzo::nccl INTERFACE mezzo::cuda)
endfunction()
