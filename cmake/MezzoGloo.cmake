# mezzo::gloo: mezzo::mezzo and the definitions of libtorch's Gloo process group, for mezzo/distributed/gloo_backend.h.
# libtorch contains Gloo, but not its headers (Debian and Ubuntu: apt-get install libgloo-dev).
#
#   GLOO_INCLUDE_DIR   the directory of gloo/context.h, if CMake does not search it

# Finds Gloo's headers. MEZZO_GLOO_NOT_FOUND_REASON is empty if they were found.
macro(mezzo_find_gloo)
  set(MEZZO_GLOO_NOT_FOUND_REASON "")
  find_path(GLOO_INCLUDE_DIR gloo/context.h DOC "The directory of gloo/context.h")
  if(NOT GLOO_INCLUDE_DIR)
    set(MEZZO_GLOO_NOT_FOUND_REASON "no gloo/context.h was found; install libgloo-dev, or set GLOO_INCLUDE_DIR")
  endif()
endmacro()

function(mezzo_add_gloo)
  add_library(mezzo::gloo INTERFACE IMPORTED GLOBAL)
  target_compile_definitions(mezzo::gloo INTERFACE USE_C10D_GLOO)
  target_include_directories(mezzo::gloo INTERFACE "${GLOO_INCLUDE_DIR}")
  target_link_libraries(mezzo::gloo INTERFACE mezzo::mezzo)
endfunction()
