// error: mezzo::initialize: the second argument is not an optimizer or a level
#include <mezzo/opt_levels/amp.h>

void initialize_optimizer_pointer(std::shared_ptr<torch::nn::Module> model,
                                  torch::optim::Optimizer* optimizer) {
#ifdef MEZZO_LEGAL
  (void)mezzo::initialize(model, *optimizer);
#else
  (void)mezzo::initialize(model, optimizer);
#endif
}
