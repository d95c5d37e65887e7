# mezzo::cuda: mezzo::mezzo and its CUDA kernels, a static library that nvcc compiles once per build tree. Built only if a target links
# it. Needs CMake's language CUDA. The library has one object, which registers the kernels at program start. No symbol refers to
# this object, so the library is linked with WHOLE_ARCHIVE.

# CMake 3.25 does not know nvcc 13's option for C++20, and libtorch's package makes that an error.
if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()

# Overrides --use_fast_math in CMAKE_CUDA_FLAGS, which would round divisions and square roots differently from the CPU kernels, and
# flush subnormal numbers to zero.
set(MEZZO_CUDA_ARITHMETIC -prec-div=true -prec-sqrt=true -ftz=false -fmad=true)

function(mezzo_add_cuda include_dir)
  add_library(mezzo_cuda_kernels STATIC EXCLUDE_FROM_ALL "${include_dir}/mezzo/kernels/cuda/mezzo_cuda.cu")
  target_compile_options(mezzo_cuda_kernels PRIVATE
    "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20;${MEZZO_CUDA_ARITHMETIC}>")
  target_link_libraries(mezzo_cuda_kernels PUBLIC mezzo::mezzo)
  set_target_properties(mezzo_cuda_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
  add_library(mezzo_cuda INTERFACE)
  target_compile_options(mezzo_cuda INTERFACE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20>")
  target_link_libraries(mezzo_cuda INTERFACE mezzo::mezzo "$<LINK_LIBRARY:WHOLE_ARCHIVE,mezzo_cuda_kernels>")
  add_library(mezzo::cuda ALIAS mezzo_cuda)
endfunction()
