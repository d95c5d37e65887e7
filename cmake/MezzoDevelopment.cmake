# Settings of mezzo's own tests, examples and benchmarks. Projects that use mezzo do not include this file.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(MEZZO_CCACHE ccache)
if(MEZZO_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # CCACHE_SLOPPINESS and -fpch-preprocess let ccache hit with precompiled headers, CCACHE_BASEDIR in other clones.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${MEZZO_CCACHE})
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
endif()

# g++'s garbage collector reads the whole precompiled header, most of a gigabyte: 5 % of the compile time.
add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-heapsize=3000000>)

# Ninja's default is more jobs than cores, which takes 1.2 times as long. A job needs 3 GB.
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
  # False positives of g++ 12 in inlined std::string operations and in libtorch's optional batches.
  target_compile_options(mezzo_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-stringop-overflow -Wno-restrict -Wno-array-bounds -Wno-maybe-uninitialized>)
endif()
