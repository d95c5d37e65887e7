# -DCOMPILER, -DSOURCE, -DINCLUDES and -DDEFINITIONS, both parted by |: SOURCE is refused in these words.
set(sentences
  "mezzo::initialize: the first argument is no model"
  "mezzo::initialize: the second argument is no optimizer and no level"
  "amp.forward(model, ...): the first argument is no model")
string(REPLACE "|" ";-I;" includes "-I;${INCLUDES}")
string(REPLACE "|" ";-D;" definitions "-D;${DEFINITIONS}")
execute_process(COMMAND "${COMPILER}" -std=c++20 -fsyntax-only ${includes} ${definitions} "${SOURCE}"
                ERROR_VARIABLE said RESULT_VARIABLE status)
if(status EQUAL 0)
  message(FATAL_ERROR "${SOURCE} compiles")
endif()
foreach(sentence IN LISTS sentences)
  string(FIND "${said}" "${sentence}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "The compiler does not say \"${sentence}\". It says:\n${said}")
  endif()
endforeach()
