// Training that began in Python goes on in C++: weights and the state of AdamW. Takes a file of
//
//     torch.save({"weights": [p.detach() for p in model.parameters()],
//                 "optimizer": optimizer.state_dict()}, path)
//
// of the model below. Exits with 1 if a step does not go on from it.
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

#include "python_adamw.h"

int main(int count, char** arguments) try {
  if (count != 2) {
    std::fprintf(stderr, "usage: %s FILE\n", arguments[0]);
    return 2;
  }
  torch::nn::Sequential model(torch::nn::Linear(3, 2), torch::nn::Linear(2, 1));
  const c10::IValue file = read_python_file(arguments[1]);
  {
    const torch::NoGradGuard no_grad;
    const c10::IValue weights = python_item(file, "weights");
    const auto parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].copy_(weights.toListRef().at(i).toTensor());
    }
  }
  mezzo::optim::AdamW optimizer({{model->ptr(0)->parameters()}, {model->ptr(1)->parameters()}},
                                mezzo::optim::AdamWOptions());
  load_python_adamw(optimizer, python_item(file, "optimizer"));

  const auto input = torch::ones({4, 3});
  const double before = model->forward(input).square().sum().item<double>();
  model->forward(input).square().sum().backward();
  optimizer.step();
  const double after = model->forward(input).square().sum().item<double>();
  const auto& state = static_cast<torch::optim::AdamWParamState&>(
      *optimizer.state().at(model->parameters()[0].unsafeGetTensorImpl()));
  std::printf("step %lld, lr %g and %g, loss %.4f to %.4f\n", static_cast<long long>(state.step()),
              optimizer.param_groups()[0].options().get_lr(),
              optimizer.param_groups()[1].options().get_lr(), before, after);
  return state.step() > 1 && after < before ? 0 : 1;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "python_adamw: %s\n", error.what_without_backtrace());
  return 2;
}
