// error: use of deleted function .*backward\(
// note: = delete;  // \{\.loss_id = 1\}
#include <mezzo/opt_levels/amp.h>

void backward_of_a_number(mezzo::Amp& amp, torch::optim::Optimizer& optimizer) {
#ifdef MEZZO_LEGAL
  amp.backward(torch::Tensor(), optimizer, {.loss_id = 1});
#else
  amp.backward(torch::Tensor(), optimizer, 1);
#endif
}
