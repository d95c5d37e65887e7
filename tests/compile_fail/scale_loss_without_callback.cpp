// error: use of deleted function .*scale_loss\(
// note: = delete;  // amp\.backward\(loss, optimizer\)
#include <mezzo/opt_levels/amp.h>

void scale_loss_alone(mezzo::Amp& amp, torch::optim::Optimizer& optimizer) {
#ifdef MEZZO_LEGAL
  amp.backward(torch::Tensor(), optimizer);
#else
  amp.scale_loss(torch::Tensor(), optimizer);
#endif
}
