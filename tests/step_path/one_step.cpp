// The step that step_path.py measures: of AdamW on the CPU, clipped, after two steps that made the
// state. Compiled with --coverage and -finstrument-functions; counts and calls are those of the
// third `scaler.step` alone.
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" void __gcov_reset();
extern "C" void __gcov_dump();

namespace {

bool is_measured = false;
std::size_t calls = 0;
void* called[1U << 20U];

}  // namespace

extern "C" __attribute__((no_instrument_function)) void __cyg_profile_func_enter(void* function,
                                                                                 void* /*from*/) {
  if (is_measured && calls < sizeof(called) / sizeof(called[0])) called[calls++] = function;
}
extern "C" __attribute__((no_instrument_function)) void __cyg_profile_func_exit(void* /*function*/,
                                                                                void* /*from*/) {}

int main(int /*count*/, char** arguments) {
  torch::nn::Linear model(64, 64);
  mezzo::optim::AdamW optimizer(model->parameters(), mezzo::optim::AdamWOptions(1e-3));
  mezzo::GradScaler scaler;
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    scaler.scale(model(torch::ones({8, 64})).square().mean()).backward();
    __gcov_reset();
    is_measured = i == 2;
    const auto result = scaler.step(optimizer, {.max_norm = 1.0});
    is_measured = false;
    if (i == 2) __gcov_dump();
    if (!result.ran()) return EXIT_FAILURE;
    scaler.update();
  }
  std::FILE* const trace = std::fopen(arguments[1], "w");
  for (std::size_t i = 0; i < calls; ++i) std::fprintf(trace, "%p\n", called[i]);
  std::fclose(trace);
  std::_Exit(EXIT_SUCCESS);  // without another dump of the counts
}
