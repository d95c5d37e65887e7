// error: use of deleted function .*initialize\(
// note: = delete;  // \{\.num_losses = 2\}
#include <mezzo/opt_levels/amp.h>

void initialize_with_a_number(std::shared_ptr<torch::nn::Module> model,
                              torch::optim::Optimizer& sgd) {
#ifdef MEZZO_LEGAL
  (void)mezzo::initialize(model, sgd, "O1", {.num_losses = 2});
#else
  mezzo::initialize(model, sgd, "O1", 2);
#endif
}
