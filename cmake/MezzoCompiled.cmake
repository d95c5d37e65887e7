# mezzo::compiled: mezzo::mezzo with its loops over gradients and parameters, and functions, compiled once for programs of many units
# (mezzo/optim/compiled.h). mezzo::compiled_cuda: the same of mezzo::cuda. Neither is built unless something links it.

# mezzo_add_compiled(NAME MEZZO FOLDER): a static library NAME of MEZZO's loops, from the headers in FOLDER.
function(mezzo_add_compiled name mezzo include_folder)
  add_library(${name} STATIC EXCLUDE_FROM_ALL "${include_folder}/mezzo/compiled.cpp"
      "${include_folder}/mezzo/optim/compiled.cpp")
  target_link_libraries(${name} PUBLIC ${mezzo})
  target_compile_definitions(${name} PUBLIC MEZZO_COMPILED)
  if(mezzo STREQUAL "mezzo::cuda")
    target_compile_definitions(${name} PUBLIC MEZZO_COMPILED_WITH_CUDA)
  endif()
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON UNITY_BUILD OFF)
endfunction()

# Optimised whatever the build type is: a program that is debugged still trains at a fair speed.
function(mezzo_optimise name)
  target_compile_options(${name} PRIVATE "$<$<OR:$<CONFIG:>,$<CONFIG:Debug>>:-O2>")
endfunction()

# The targets of the package, for which mezzo_add_compiled is called where mezzo::mezzo and libtorch are there.
macro(mezzo_add_compiled_targets include_folder)
  if(NOT TARGET mezzo::compiled)
    mezzo_add_compiled(mezzo_compiled mezzo::mezzo "${include_folder}")
    mezzo_optimise(mezzo_compiled)
    add_library(mezzo::compiled ALIAS mezzo_compiled)
  endif()
  if(TARGET mezzo::cuda AND NOT TARGET mezzo::compiled_cuda)
    mezzo_add_compiled(mezzo_compiled_cuda mezzo::cuda "${include_folder}")
    mezzo_optimise(mezzo_compiled_cuda)
    add_library(mezzo::compiled_cuda ALIAS mezzo_compiled_cuda)
  endif()
endmacro()
