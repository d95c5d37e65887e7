// error: use of deleted function .*OptionsAreSetByCalls
#include <mezzo/optim/adamw.h>

mezzo::optim::AdamW adamw_of_fields(std::vector<at::Tensor> parameters) {
#ifdef MEZZO_LEGAL
  return mezzo::optim::AdamW(std::move(parameters), {1e-3});
#else
  return mezzo::optim::AdamW(std::move(parameters), {.lr = 1e-3});
#endif
}
