# cmake -DNM=nm -DOBJECT=file -P check_no_symbols.cmake: fails if the object file defines symbols of mezzo.
execute_process(COMMAND "${NM}" -C --defined-only "${OBJECT}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]*mezzo::[^\n]*" mezzo_symbols "${symbols}")
list(LENGTH mezzo_symbols count)
if(count)
  list(JOIN mezzo_symbols "\n" mezzo_symbols)
  message(FATAL_ERROR "Including mezzo's headers defines ${count} symbols. Is a virtual function of a non-template class not declared "
                      "`inline`?\n${mezzo_symbols}")
endif()
