// Loads libraries with two versions of mezzo into the global symbol scope, where the first
// definition of a symbol wins, and checks that each trains with its own code and state:
//
//   two_versions LIBRARY LIBRARY

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "../support/shared_library.h"

namespace {

using test_support::expect;

struct Library : test_support::SharedLibrary {
  explicit Library(const char* path) : SharedLibrary(path, RTLD_GLOBAL) {}

  /// The name of the inline namespace, such as v1_2_3.
  std::string version() const {
    const int number = call<int>("version");
    return "v" + std::to_string(number / 10000) + "_" + std::to_string(number / 100 % 100) + "_" +
           std::to_string(number % 100);
  }
};

constexpr int kSteps = 6;
bool overflows_at(int step) { return step == 2; }

std::vector<double> train_alone(const Library& library) {
  void* const training = library.call<void*>("start");
  std::vector<double> results;
  for (int i = 0; i < kSteps; ++i) {
    results.push_back(library.call<double>("step", training, overflows_at(i)));
  }
  library.call<void>("end", training);
  return results;
}

/// Both libraries train in turns; the third step of each overflows.
void expect_independent_training(const Library& first, const Library& second) {
  const std::vector<double> alone[] = {train_alone(first), train_alone(second)};
  void* const trainings[] = {first.call<void*>("start"), second.call<void*>("start")};
  for (int i = 0; i < kSteps; ++i) {
    expect(first.call<double>("step", trainings[0], overflows_at(i)) == alone[0][i],
           "interleaved training equals training alone, first library, step " + std::to_string(i));
    expect(second.call<double>("step", trainings[1], overflows_at(i)) == alone[1][i],
           "interleaved training equals training alone, second library, step " + std::to_string(i));
  }
  first.call<void>("end", trainings[0]);
  second.call<void>("end", trainings[1]);
}

/// An optimizer of another version is treated as a foreign optimizer.
void expect_foreign_optimizer_step(const Library& owner, const Library& other) {
  void* const training = owner.call<void*>("start");
  auto* const optimizer = owner.call<torch::optim::Optimizer*>("optimizer_of", training);
  const at::Tensor& weight = *owner.call<const at::Tensor*>("weight_of", training);
  const at::Tensor before = weight.detach().clone();
  expect(owner.call<bool, torch::optim::Optimizer&>("is_own", *optimizer),
         owner.version() + " recognizes its own optimizer");
  expect(!other.call<bool, torch::optim::Optimizer&>("is_own", *optimizer),
         other.version() + " does not recognize an optimizer of another version");
  other.call<void, torch::optim::Optimizer&, const at::Tensor&>("step_by_scaler", *optimizer,
                                                                weight);
  // AdamW's first step changes a weight by the learning rate, plus weight decay.
  const double moved = (before * (1 - 0.01 * 1e-2) - weight.detach()).mean().item<double>();
  expect(moved > 0.0099 && moved < 0.0101,
         other.version() + " steps it by " + std::to_string(moved) + " with lr = 0.01");
  owner.call<void>("end", training);
}

at::ScalarType dtype_of_mm(const Library& library) {
  library.call<void>("enter");
  const at::ScalarType dtype = at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type();
  library.call<void>("leave");
  return dtype;
}

std::string deny(const Library& library, const std::string& op) {
  return library.call<std::string, const std::string&>("deny", op);
}

/// Both versions may override an op. Their overrides are independent.
void expect_independent_overrides(const Library& first, const Library& second) {
  expect(deny(first, "aten::mm") == "no error", "the first version overrides mm");
  expect(dtype_of_mm(first) == at::kFloat, "its regions deny mm");
  expect(dtype_of_mm(second) == at::kBFloat16, "regions of the second do not");
  expect(deny(second, "aten::mm") == "no error", "the second version overrides mm too");
  expect(dtype_of_mm(second) == at::kFloat, "then its regions deny mm");
  expect(dtype_of_mm(first) == at::kFloat, "regions of the first still deny mm");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const Library first(argv[1]), second(argv[2]);
  expect(first.version() != second.version(), "the versions differ");
  for (const Library* library : {&first, &second}) {
    const std::string type = library->call<const char*>("type_name");
    expect(type.find(library->version()) != std::string::npos,
           "the type name has the version: " + type);
  }
  expect_independent_training(first, second);
  expect_foreign_optimizer_step(first, second);
  expect_foreign_optimizer_step(second, first);
  expect_independent_overrides(first, second);
  return expect(true, "");
}
