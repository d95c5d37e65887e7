# Compiles mezzo_cuda.cu for one architecture and links the object twice, like a program with two libraries that contain it:
# all global symbols must be weak. A user's --use_fast_math must not change the kernels' arithmetic.

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed)
    message(FATAL_ERROR "${what}:\n${output}")
  endif()
endfunction()

file(MAKE_DIRECTORY "${OUT}")
run("nvcc does not compile the kernels" "${NVCC}" -ccbin "${COMPILER}" -std=c++20 -arch=sm_80
    ${HEADERS} -c "${KERNELS}" -o "${OUT}/first.o")
file(COPY_FILE "${OUT}/first.o" "${OUT}/second.o")
run("two objects with the kernels do not link" "${COMPILER}" -r -nostdlib "${OUT}/first.o" "${OUT}/second.o"
    -o "${OUT}/both.o")
execute_process(COMMAND "${NM}" -C --defined-only "${OUT}/first.o" OUTPUT_VARIABLE symbols)
string(REGEX MATCHALL "[^\n]* [TDB] [^\n]*" strong "${symbols}")
if(NOT symbols MATCHES "cuda::step_[(]" OR strong)
  message(FATAL_ERROR "These symbols are neither weak nor local: ${strong}")
endif()

run("nvcc does not compile the kernels with --use_fast_math" "${NVCC}" -ccbin "${COMPILER}" -std=c++20 -arch=sm_80
    ${HEADERS} --use_fast_math ${ARITHMETIC} --ptx "${KERNELS}" -o "${OUT}/fast.ptx")
file(STRINGS "${OUT}/fast.ptx" approximate REGEX "(div|sqrt)[.](approx|full)|(add|sub|mul|fma[.]rn|div[.]rn)[.]ftz")
if(approximate)
  list(LENGTH approximate count)
  message(FATAL_ERROR "With --use_fast_math ${count} instructions of the kernels are approximate")
endif()
