// Loads libraries that hold two versions of mezzo into one symbol scope, where the first that
// defines a symbol wins, and checks that each trains with its own code and state:
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

  /// As in a namespace: v1_2_3.
  std::string version() const {
    const int number = call<int>("version");
    return "v" + std::to_string(number / 10000) + "_" + std::to_string(number / 100 % 100) + "_" +
           std::to_string(number % 100);
  }
};

constexpr int kSteps = 6;
bool overflows_at(int step) { return step == 2; }

std::vector<double> trained_alone(const Library& library) {
  void* const training = library.call<void*>("start");
  std::vector<double> seen;
  for (int i = 0; i < kSteps; ++i) {
    seen.push_back(library.call<double>("step", training, overflows_at(i)));
  }
  library.call<void>("end", training);
  return seen;
}

/// Step by step beside each other, where only the first one's third step overflows.
void expect_to_train_beside_each_other(const Library& first, const Library& second) {
  const std::vector<double> alone[] = {trained_alone(first), trained_alone(second)};
  void* const trainings[] = {first.call<void*>("start"), second.call<void*>("start")};
  for (int i = 0; i < kSteps; ++i) {
    expect(first.call<double>("step", trainings[0], overflows_at(i)) == alone[0][i],
           "the first trains beside the second as alone, step " + std::to_string(i));
    expect(second.call<double>("step", trainings[1], overflows_at(i)) == alone[1][i],
           "the second trains beside the first as alone, step " + std::to_string(i));
  }
  first.call<void>("end", trainings[0]);
  second.call<void>("end", trainings[1]);
}

/// An optimizer of another version is one of anybody's.
void expect_to_step_the_others_optimizer(const Library& owner, const Library& other) {
  void* const training = owner.call<void*>("start");
  auto* const optimizer = owner.call<torch::optim::Optimizer*>("optimizer_of", training);
  const at::Tensor& weight = *owner.call<const at::Tensor*>("weight_of", training);
  const at::Tensor before = weight.detach().clone();
  expect(owner.call<bool, torch::optim::Optimizer&>("is_own", *optimizer),
         owner.version() + " knows its own optimizer");
  expect(!other.call<bool, torch::optim::Optimizer&>("is_own", *optimizer),
         other.version() + " takes an optimizer of another version for one of libtorch's kind");
  other.call<void, torch::optim::Optimizer&, const at::Tensor&>("step_by_scaler", *optimizer,
                                                                weight);
  // AdamW's first step is as long as the rate, whatever the gradient, and its decay beside.
  const double moved = (before * (1 - 0.01 * 1e-2) - weight.detach()).mean().item<double>();
  expect(moved > 0.0099 && moved < 0.0101,
         other.version() + " steps it, by " + std::to_string(moved) + " for a rate of 0.01");
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

/// Both may override an op, and regions of the one do not feel the other's policies.
void expect_policies_of_two_versions(const Library& first, const Library& second) {
  expect(deny(first, "aten::mm") == "no error", "the first may override mm");
  expect(dtype_of_mm(first) == at::kFloat, "the first's region denies mm");
  expect(dtype_of_mm(second) == at::kBFloat16, "the second's does not");
  expect(deny(second, "aten::mm") == "no error", "the second may override it too");
  expect(dtype_of_mm(second) == at::kFloat, "then its region denies mm");
  expect(dtype_of_mm(first) == at::kFloat, "and so does the first's, as before");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const Library first(argv[1]), second(argv[2]);
  expect(first.version() != second.version(), "the versions differ");
  for (const Library* library : {&first, &second}) {
    const std::string type = library->call<const char*>("type_name");
    expect(type.find(library->version()) != std::string::npos,
           "the name of " + library->version() + "'s type says the version: " + type);
  }
  expect_to_train_beside_each_other(first, second);
  expect_to_step_the_others_optimizer(first, second);
  expect_to_step_the_others_optimizer(second, first);
  expect_policies_of_two_versions(first, second);
  return expect(true, "");
}
