# Compiles mezzo_cuda.cu for one architecture and links the object twice, as programs do whose libraries each carry it:
# every symbol that it defines for others is weak.

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(failed)
    message(FATAL_ERROR "${what}:\n${said}")
  endif()
endfunction()

file(MAKE_DIRECTORY "${OUT}")
run("nvcc does not compile the kernels" "${NVCC}" -ccbin "${COMPILER}" -std=c++20 -arch=sm_80 -DMEZZO_WITH_CUDA
    ${HEADERS} -c "${KERNELS}" -o "${OUT}/first.o")
file(COPY_FILE "${OUT}/first.o" "${OUT}/second.o")
run("two objects with the kernels do not link" "${COMPILER}" -r -nostdlib "${OUT}/first.o" "${OUT}/second.o"
    -o "${OUT}/both.o")
execute_process(COMMAND "${NM}" -C --defined-only "${OUT}/first.o" OUTPUT_VARIABLE symbols)
string(REGEX MATCHALL "[^\n]* [TDB] [^\n]*" strong "${symbols}")
if(NOT symbols MATCHES "cuda::step_[(]" OR strong)
  message(FATAL_ERROR "These symbols are neither weak nor the object's own: ${strong}")
endif()
