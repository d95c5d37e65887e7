# mezzo::cuda: mezzo::mezzo and its CUDA kernels, an interface source that each program linking it compiles with nvcc.
# Needs the language CUDA in the project that links it.

# CMake 3.25 does not know that nvcc 13 speaks C++20, and libtorch's package makes that an error.
if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

function(mezzo_add_cuda include_folder)
  add_library(mezzo::cuda INTERFACE IMPORTED GLOBAL)
  target_sources(mezzo::cuda INTERFACE "${include_folder}/mezzo/kernels/cuda/mezzo_cuda.cu")
  target_compile_definitions(mezzo::cuda INTERFACE MEZZO_WITH_CUDA)
  target_compile_options(mezzo::cuda INTERFACE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20>")
  target_link_libraries(mezzo::cuda INTERFACE mezzo::mezzo)
endfunction()
