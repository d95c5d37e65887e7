// Compiled at several optimisation levels, for vector_code.py to look at.

#include <mezzo/kernels/gradient_summary_loops.h>

mezzo::detail::SummaryLoop loop_of_float() {
  return mezzo::detail::summary_loop<float>(mezzo::detail::best_isa());
}
