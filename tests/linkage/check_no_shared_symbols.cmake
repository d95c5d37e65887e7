# cmake -DNM=nm -DFIRST=library -DSECOND=library -P check_no_shared_symbols.cmake: fails if both libraries export the same symbol of
# mezzo, which the dynamic linker would resolve to the library that was loaded first.
foreach(library IN ITEMS FIRST SECOND)
  execute_process(COMMAND "${NM}" -D -C --defined-only "${${library}}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[][;]" "?" symbols "${symbols}")  # brackets and semicolons are syntax of CMake's lists
  string(REGEX MATCHALL "[^\n]*mezzo[^\n]*" mezzo_symbols "${symbols}")
  list(TRANSFORM mezzo_symbols REPLACE "^[0-9a-f]* [A-Za-z] " "")
  list(LENGTH mezzo_symbols ${library}_count)
  if(${library}_count LESS 100)
    message(FATAL_ERROR "${${library}} exports only ${${library}_count} symbols of mezzo: expected at least 100")
  endif()
  set(${library}_symbols "${mezzo_symbols}")
endforeach()
set(shared "${FIRST_symbols}")
list(REMOVE_ITEM FIRST_symbols ${SECOND_symbols})
list(REMOVE_ITEM shared ${FIRST_symbols})
list(LENGTH shared count)
if(count)
  list(JOIN shared "\n" shared)
  message(FATAL_ERROR "Libraries of two versions share ${count} symbols of mezzo. Is a declaration outside "
                      "MEZZO_ABI_NAMESPACE, or extern \"C\"?\n${shared}")
endif()
