# mezzo::mezzo, the headers and libtorch; it builds with the host compiler alone.
# mezzo::cuda adds the kernels: an interface source that the program linking it compiles with nvcc, once.

add_library(mezzo INTERFACE)
add_library(mezzo::mezzo ALIAS mezzo)
target_compile_features(mezzo INTERFACE cxx_std_20)
target_include_directories(mezzo INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
target_link_libraries(mezzo INTERFACE mezzo::libtorch)
