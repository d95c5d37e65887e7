# cmake -DNM=nm -DOBJECT=file -P check_no_symbols.cmake: stops if the object defines anything of mezzo's.
execute_process(COMMAND "${NM}" -C --defined-only "${OBJECT}" OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]*mezzo::[^\n]*" own "${symbols}")
list(LENGTH own count)
if(count)
  list(JOIN own "\n" own)
  message(FATAL_ERROR "A unit that only includes mezzo's headers defines ${count} symbols. Is a virtual function of a class "
                      "that is no template declared without `inline`?\n${own}")
endif()
