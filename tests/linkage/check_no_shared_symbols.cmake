# cmake -DNM=nm -DFIRST=library -DSECOND=library -P check_no_shared_symbols.cmake: stops if both export a symbol of mezzo's, which the
# dynamic linker would take from whichever was loaded first.
foreach(library IN ITEMS FIRST SECOND)
  execute_process(COMMAND "${NM}" -D -C --defined-only "${${library}}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[][;]" "?" symbols "${symbols}")  # brackets and semicolons are CMake's own
  string(REGEX MATCHALL "[^\n]*mezzo[^\n]*" own "${symbols}")
  list(TRANSFORM own REPLACE "^[0-9a-f]* [A-Za-z] " "")
  list(LENGTH own ${library}_count)
  if(${library}_count LESS 100)
    message(FATAL_ERROR "${${library}} exports only ${${library}_count} symbols of mezzo's: this test would see nothing")
  endif()
  set(${library}_symbols "${own}")
endforeach()
set(shared "${FIRST_symbols}")
list(REMOVE_ITEM FIRST_symbols ${SECOND_symbols})
list(REMOVE_ITEM shared ${FIRST_symbols})
list(LENGTH shared count)
if(count)
  list(JOIN shared "\n" shared)
  message(FATAL_ERROR "Libraries of two versions share ${count} symbols of mezzo's. Is something outside of "
                      "MEZZO_ABI_NAMESPACE, or extern \"C\"?\n${shared}")
endif()
