# What mezzo's own tests, examples and benchmarks are compiled with; no user of the library sees it.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(MEZZO_CCACHE ccache)
if(MEZZO_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # With the sloppiness and -fpch-preprocess, ccache sees through precompiled headers; with the base, into other clones.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${MEZZO_CCACHE})
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endif()

# Collecting garbage, g++ reads all of a precompiled header, most of a gigabyte: a twentieth of its time.
add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=3000000>)

# Ninja would start a job more than there are cores, which takes a sixth longer here; and a job takes 3 GB.
cmake_host_system_information(RESULT mezzo_cores QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT mezzo_jobs QUERY TOTAL_PHYSICAL_MEMORY)
math(EXPR mezzo_jobs "${mezzo_jobs} / 3000 + 1")
if(mezzo_jobs GREATER mezzo_cores)
  set(mezzo_jobs ${mezzo_cores})
endif()
set_property(GLOBAL APPEND PROPERTY JOB_POOLS mezzo_compile=${mezzo_jobs})
if(NOT DEFINED CMAKE_JOB_POOL_COMPILE)
  set(CMAKE_JOB_POOL_COMPILE mezzo_compile)
endif()

add_library(mezzo_warnings INTERFACE)
target_compile_options(mezzo_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # g++ 12 sees overflows in inlined std::string operations that are none, and unset members of libtorch's optional batches.
  target_compile_options(mezzo_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow -Wno-restrict -Wno-array-bounds -Wno-maybe-uninitialized>)
endif()
