# mezzo::compiled: mezzo::mezzo with its kernels and functions compiled once, for programs of many translation units
# (mezzo/optim/compiled.h). Built only if a target links it. Always optimized, so that a debug build trains at a usable speed.

function(mezzo_add_compiled include_dir)
  if(TARGET mezzo::compiled)
    return()
  endif()
  add_library(mezzo_compiled STATIC EXCLUDE_FROM_ALL "${include_dir}/mezzo/compiled.cpp"
      "${include_dir}/mezzo/optim/compiled.cpp")
  target_link_libraries(mezzo_compiled PUBLIC mezzo::mezzo)
  target_compile_definitions(mezzo_compiled PUBLIC MEZZO_COMPILED_LIB)
  target_compile_options(mezzo_compiled PRIVATE "$<$<OR:$<CONFIG:>,$<CONFIG:Debug>>:-O2>")
  set_target_properties(mezzo_compiled PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
  add_library(mezzo::compiled ALIAS mezzo_compiled)
endfunction()
