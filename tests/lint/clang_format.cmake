# Fails for each source that clang-format would change:
#
#   cmake -DSOURCE=<mezzo> -DCLANG_FORMAT=<clang-format> -P clang_format.cmake

set(sources)
foreach(directory IN ITEMS benchmarks examples include tests)
  foreach(suffix IN ITEMS h cpp cuh cu)
    file(GLOB_RECURSE found "${SOURCE}/${directory}/*.${suffix}")
    list(APPEND sources ${found})
  endforeach()
endforeach()
if(NOT sources)
  message(FATAL_ERROR "no sources below ${SOURCE}")
endif()
execute_process(COMMAND "${CLANG_FORMAT}" --style=file --dry-run -Werror ${sources} RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "these sources are not formatted; run: clang-format -i FILE")
endif()
