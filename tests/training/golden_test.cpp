// Compares training steps with a recording, bitwise.
//
// golden_bits.txt has a line for each case: its name (optimizer/weights/step mode), and hashes of
// the results of 50 steps. The columns:
//
//   parameters   hash of the parameters after every step
//   state        hash of the moments, float32 masters and step counts after the last step
//   scales       hash of the loss scale after every step
//   results      hash of every StepResult
//   gradients    hash of `.grad` after every step; - for weights with masters after unscale_, whose
//                `.grad` may be float32
//
// The bits are the same for every instruction set of mezzo's kernels (tests/kernels compares them),
// number of threads, compiler and ATEN_CPU_CAPABILITY. Gradients are computed with integer
// arithmetic, not with libtorch's kernels. Cases with an optimizer of libtorch use learning rates,
// momenta and scales for which every product is exact, so that fused multiply-adds do not matter.
//
// To record again, after a change that is meant to change results (give the reason in the commit):
//
//   MEZZO_RECORD_GOLDEN=tests/training/golden_bits.txt
//     build/test/tests/mezzo_tests --gtest_filter='GoldenBits.*'

#include <mezzo/optim/adamw.h>
#include <mezzo/optim/lion.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/optim/sgd.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace golden {
namespace {

using mezzo::optim::WeightStorage;
using torch::Tensor;

constexpr int kSteps = 50;

/// 64-bit FNV-1a.
class Hash {
 public:
  /// Adds the dtype and the elements in index order, or that the tensor is undefined. The payload
  /// of NaN is ignored, since it depends on the order of operands.
  void add(const Tensor& tensor) {
    add_bytes(tensor.defined() ? c10::toString(tensor.scalar_type()) : "undefined");
    if (!tensor.defined()) return;
    const Tensor values = tensor.detach().masked_fill(tensor.detach().isnan(), NAN).contiguous();
    add_bytes({static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
  }
  void add(double value) { add(torch::tensor(value, torch::kDouble)); }

  std::string text() const {
    std::ostringstream text;
    text << std::hex << hash_;
    return text.str();
  }

 private:
  void add_bytes(std::string_view bytes) {
    for (const char byte : bytes) {
      hash_ = (hash_ ^ static_cast<unsigned char>(byte)) * 0x100000001b3U;
    }
  }
  uint64_t hash_ = 0xcbf29ce484222325U;
};

/// Returns a 40-bit number in [-1, 1) with one of eight magnitudes: splitmix64 of `key`.
double random_value(uint64_t key) {
  uint64_t bits = key + 0x9e3779b97f4a7c15U;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  bits ^= bits >> 31;
  const auto mantissa = static_cast<int64_t>(bits >> 24) - (int64_t{1} << 39);
  return static_cast<double>(mantissa) * (0x1p-39 / static_cast<double>(1U << (bits & 7U)));
}

/// Weight storage and dtypes of a case. Parameter i has dtype i modulo the number of dtypes.
struct Weights {
  std::string name;
  WeightStorage storage = WeightStorage::plain;
  std::vector<torch::ScalarType> parameters;
  std::vector<torch::ScalarType> gradients;

  bool has_masters() const {
    return storage == WeightStorage::fp32_master || storage == WeightStorage::split_master;
  }
};

std::vector<Weights> all_weights() {
  using enum WeightStorage;
  const auto kFloat = torch::kFloat, kDouble = torch::kDouble;
  const auto kBFloat16 = torch::kBFloat16, kHalf = torch::kHalf;
  return {{"float", plain, {kFloat}, {kFloat}},
          {"double", plain, {kDouble}, {kDouble}},
          {"bfloat16", plain, {kBFloat16}, {kBFloat16}},
          {"bfloat16_master", fp32_master, {kBFloat16}, {kBFloat16}},
          {"bfloat16_split", split_master, {kBFloat16}, {kBFloat16}},
          {"bfloat16_stochastic", stochastic_rounding, {kBFloat16}, {kBFloat16}},
          {"float16", plain, {kHalf}, {kHalf}},
          {"float16_master", fp32_master, {kHalf}, {kHalf}},
          {"float_of_bfloat16", plain, {kFloat}, {kBFloat16}},
          {"float_of_float16", plain, {kFloat}, {kHalf}},
          {"double_of_float", plain, {kDouble}, {kFloat}},
          {"mixed_master",
           fp32_master,
           {kFloat, kBFloat16, kHalf, kDouble},
           {kFloat, kBFloat16, kHalf, kDouble}}};
}

Weights find_weights(const std::string& name) {
  for (const Weights& weights : all_weights()) {
    if (weights.name == name) return weights;
  }
  TORCH_CHECK(false, "no weights are named ", name);
}

/// 16-bit weights with a MasterWeights.
Weights with_masters(const std::string& name) {
  Weights weights = find_weights(name);
  weights.storage = WeightStorage::fp32_master;
  return weights;
}

/// How a case steps: with a GradScaler, unless has_scaler is false.
struct StepMode {
  const char* name;
  bool unscales = false;        ///< calls scaler.unscale_(optimizer) before the step
  bool is_clipped = false;      ///< {.max_norm = 1}
  bool zeroes = false;          ///< {.zero_grad = true}
  bool clamps = false;          ///< clip_grad_value_(parameters, 0.05) before the step
  bool is_disabled = false;     ///< the scaler
  bool has_scaler = true;       ///< otherwise optimizer.step()
  bool has_lr_factors = false;  ///< set_lr_factors
};

constexpr StepMode kStepModes[] = {
    {.name = "step"},
    {.name = "norm", .is_clipped = true},
    {.name = "norm_zero", .is_clipped = true, .zeroes = true},
    {.name = "unscale", .unscales = true},
    {.name = "unscale_norm", .unscales = true, .is_clipped = true},
    {.name = "unscale_value", .unscales = true, .clamps = true},
    {.name = "disabled", .is_clipped = true, .is_disabled = true},
    {.name = "bare", .has_scaler = false},
    {.name = "table", .is_clipped = true, .has_lr_factors = true},
    {.name = "zero", .zeroes = true},
    {.name = "unscale_norm_zero", .unscales = true, .is_clipped = true, .zeroes = true}};

StepMode find_step_mode(std::string_view name) {
  for (const StepMode& mode : kStepModes) {
    if (mode.name == name) return mode;
  }
  TORCH_CHECK(false, "no step mode is named ", name);
}

struct Case {
  Weights weights;
  StepMode mode;
  double init_scale = 30000;  ///< not a power of two, so that unscaling rounds
  int64_t hysteresis = 1;
  bool writes_weights = false;  ///< modifies weights outside the optimizer between two steps
};

/// The columns of a case in golden_bits.txt, without its name.
using Line = std::vector<std::string>;

// Parameter 4 is channels_last, parameter 5 has no gradient in every third step. Parameter 3 is
// split into two chunks.
constexpr std::size_t kParameters = 7;
constexpr std::size_t kSometimesWithoutGradient = 5;

Tensor values_like(const std::vector<int64_t>& shape, torch::ScalarType dtype, uint64_t key,
                   double factor) {
  const Tensor values = torch::empty(shape, torch::kDouble);
  double* const data = values.mutable_data_ptr<double>();
  for (int64_t j = 0; j != values.numel(); ++j) {
    data[j] = random_value(key + static_cast<uint64_t>(j)) * factor;
  }
  return dtype == torch::kDouble ? values : values.to(torch::kFloat).to(dtype);
}

std::vector<int64_t> get_shape(std::size_t i) {
  const std::vector<int64_t> shapes[kParameters] = {{1},          {7},  {300}, {16385 + 3},
                                                    {2, 3, 4, 5}, {33}, {5, 9}};
  return shapes[i];
}

std::vector<Tensor> make_parameters(const Weights& weights) {
  std::vector<Tensor> parameters;
  for (std::size_t i = 0; i != kParameters; ++i) {
    const auto dtype = weights.parameters[i % weights.parameters.size()];
    Tensor values = values_like(get_shape(i), dtype, uint64_t{i} << 32, 1.0);
    if (i == 4) values = values.contiguous(torch::MemoryFormat::ChannelsLast);
    parameters.push_back(values.detach().requires_grad_());
  }
  return parameters;
}

/// The parameters of group 0 (even indices) or 1 (odd indices).
std::vector<Tensor> get_group(const std::vector<Tensor>& parameters, std::size_t group) {
  std::vector<Tensor> members;
  for (std::size_t i = group; i < parameters.size(); i += 2) members.push_back(parameters[i]);
  return members;
}

/// The norm is about 18 times max_norm, and in every fourth step below it.
void set_gradients(const std::vector<Tensor>& parameters, const Case& test_case, int step,
                   double scale) {
  const bool has_overflows = !test_case.mode.is_disabled && test_case.mode.has_scaler;
  for (std::size_t i = 0; i != kParameters; ++i) {
    Tensor parameter = parameters[i];
    if (i == kSometimesWithoutGradient && step % 3 == 2) {
      parameter.mutable_grad() = Tensor();
      continue;
    }
    const auto dtype = test_case.weights.gradients[i % test_case.weights.gradients.size()];
    const uint64_t key = uint64_t{i + kParameters * static_cast<std::size_t>(step + 1)} << 32;
    Tensor gradient =
        values_like(get_shape(i), dtype, key, scale * (step % 4 == 3 ? 0x1p-8 : 0x1p-2));
    if (has_overflows && i == static_cast<std::size_t>(step) % 5) {
      Tensor last = gradient.view(-1).slice(0, -1);
      if (step % 7 == 6) last.fill_(std::numeric_limits<double>::infinity());
      if (step % 13 == 12) last.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    if (i == 4 && step % 2 == 0) gradient = gradient.contiguous(torch::MemoryFormat::ChannelsLast);
    parameter.mutable_grad() = gradient;
  }
}

/// An optimizer of libtorch or mezzo; with kMasters, an optimizer of libtorch in a MasterWeights.
template <class Optimizer, class Options, class State, bool kMasters = false>
class TestedOptimizer {
 public:
  /// `lr` is that of the first group. `set_options` sets further options of the optimizer.
  template <class SetOptions>
  TestedOptimizer(const std::vector<Tensor>& parameters, const Case& test_case, double lr,
                  const SetOptions& set_options)
      : parameters_(parameters), inner_(make(groups(parameters, lr, set_options), test_case, lr)) {
    if constexpr (kMasters) masters_.emplace(inner_);
    if constexpr (requires { stepped().set_lr_factors({}); }) {
      if (test_case.mode.has_lr_factors)
        stepped().set_lr_factors({0.25, 0.5, 1.0, 1.0, 0.5, 2.0, 0.125});
    }
  }

  auto& stepped() {
    if constexpr (kMasters) {
      return *masters_;
    } else {
      return inner_;
    }
  }

  void halve_lr(std::size_t group) {
    auto& options = inner_.param_groups().at(group).options();
    options.set_lr(options.get_lr() / 2);
  }

  void add_state_to(Hash& hash) {
    for (const Tensor& parameter : parameters_) {
      const auto found = inner_.state().find(parameter.unsafeGetTensorImpl());
      if (found == inner_.state().end()) {
        hash.add(Tensor());
        continue;
      }
      const auto& state = dynamic_cast<const State&>(*found->second);
      if constexpr (requires { state.step(); }) hash.add(static_cast<double>(state.step()));
      if constexpr (requires { state.exp_avg(); }) hash.add(state.exp_avg());
      if constexpr (requires { state.exp_avg_sq(); }) hash.add(state.exp_avg_sq());
      if constexpr (requires { state.max_exp_avg_sq(); }) hash.add(state.max_exp_avg_sq());
      if constexpr (requires { state.momentum_buffer(); }) hash.add(state.momentum_buffer());
      if constexpr (requires { state.master(); }) hash.add(state.master());
    }
    if constexpr (kMasters) {
      for (const Tensor& master : mezzo::master_params(*masters_)) hash.add(master);
    }
  }

 private:
  static Optimizer make(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                        [[maybe_unused]] const Case& test_case, double lr) {
    if constexpr (requires(Optimizer optimizer) { optimizer.weight_storage_options(); }) {
      return Optimizer(groups, Options(lr),
                       {.weight_storage = test_case.weights.storage, .seed = 11});
    } else {
      return Optimizer(groups, Options(lr));
    }
  }
  template <class SetOptions>
  static std::vector<torch::optim::OptimizerParamGroup> groups(
      const std::vector<Tensor>& parameters, double lr, const SetOptions& set_options) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (std::size_t group = 0; group != 2; ++group) {
      Options options(group == 0 ? lr : lr / 4);
      options.weight_decay(group == 0 ? 0x1p-5 : 0x1p-8);
      set_options(options);
      groups.emplace_back(get_group(parameters, group), std::make_unique<Options>(options));
    }
    return groups;
  }

  std::vector<Tensor> parameters_;
  Optimizer inner_;
  std::optional<mezzo::MasterWeights> masters_;
};

mezzo::GradScaler make_scaler(const Case& test_case) {
  mezzo::GradScaler scaler(
      {.init_scale = test_case.init_scale,
       .growth_interval = 5,
       .enabled = !test_case.mode.is_disabled,
       .hysteresis = test_case.hysteresis,
       .allow_fp16_gradients = test_case.weights.storage == WeightStorage::plain});
  scaler.on_skip(nullptr);
  return scaler;
}

void add_result(const mezzo::StepResult& result, Hash& hash) {
  for (const double value :
       std::initializer_list<double>{result.applied() ? 1.0 : 0.0, result.found_inf() ? 1.0 : 0.0,
                                     result.scale(), result.grad_norm().value_or(-1.0)}) {
    hash.add(value);
  }
}

template <class Optimizer>
mezzo::StepResult scaler_step(const std::vector<Tensor>& parameters, mezzo::GradScaler& scaler,
                              Optimizer& optimizer, StepMode mode) {
  if (mode.unscales) scaler.unscale_(optimizer);
  if (mode.clamps) torch::nn::utils::clip_grad_value_(parameters, 0.05);
  mezzo::StepOptions options{.zero_grad = mode.zeroes};
  if (mode.is_clipped) options.max_norm = 1.0;
  return scaler.step(optimizer, options);
}

struct Hashes {
  Hash parameters, scales, results, gradients;
};

template <class Optimizer>
void take_step(const std::vector<Tensor>& parameters, mezzo::GradScaler& scaler,
               Optimizer& optimizer, const Case& test_case, int step, Hashes& hashes) {
  set_gradients(parameters, test_case, step, test_case.mode.has_scaler ? scaler.get_scale() : 1.0);
  const Tensor loss = torch::ones({});
  std::optional<mezzo::StepResult> result;
  if (!test_case.mode.has_scaler) {
    optimizer.step();
  } else {
    (void)scaler.scale(loss);
    result = scaler_step(parameters, scaler, optimizer, test_case.mode);
    scaler.update();
  }
  if (result.has_value()) {
    add_result(*result, hashes.results);
    hashes.scales.add(scaler.get_scale());
  }
  for (const Tensor& parameter : parameters) {
    hashes.parameters.add(parameter);
    hashes.gradients.add(parameter.grad());
  }
}

void write_weights(const std::vector<Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  parameters[2].slice(0, 100, 200).fill_(0.25);
  parameters[3].slice(0, 16380, 16386).zero_();
}

/// After unscale_, `.grad` of a weight with a master may have either dtype.
bool compares_gradients(const Case& test_case) {
  return !(test_case.weights.has_masters() && test_case.mode.unscales);
}

/// Runs a case with `make(parameters)`, a TestedOptimizer.
template <class Make>
Line run_case(const Case& test_case, const Make& make) {
  const std::vector<Tensor> parameters = make_parameters(test_case.weights);
  auto tested = make(parameters);
  mezzo::GradScaler scaler = make_scaler(test_case);
  Hashes hashes;
  for (int step = 0; step != kSteps; ++step) {
    if (step == 30) tested->halve_lr(1);
    if (step == 33 && test_case.writes_weights) write_weights(parameters);
    take_step(parameters, scaler, tested->stepped(), test_case, step, hashes);
  }
  for (const Tensor& parameter : parameters) {
    EXPECT_TRUE(parameter.isfinite().all().item<bool>()) << "a NaN would hide later differences";
  }
  Hash state;
  tested->add_state_to(state);
  return {hashes.parameters.text(), state.text(), hashes.scales.text(), hashes.results.text(),
          compares_gradients(test_case) ? hashes.gradients.text() : "-"};
}

template <class Optimizer, class Options, class State, bool kMasters = false, class SetOptions>
std::function<Line(const Case&)> make_runner(double lr, const SetOptions& set_options) {
  return [=](const Case& test_case) {
    return run_case(test_case, [&](const std::vector<Tensor>& parameters) {
      using Tested = TestedOptimizer<Optimizer, Options, State, kMasters>;
      return std::make_unique<Tested>(parameters, test_case, lr, set_options);
    });
  };
}

struct NamedOptimizer {
  std::string name;
  std::function<Line(const Case&)> run;
};

std::vector<NamedOptimizer> mezzo_optimizers() {
  using namespace mezzo::optim;
  const auto defaults = [](auto&) {};
  const auto amsgrad = [](AdamWOptions& options) { options.amsgrad(true); };
  const auto nesterov = [](SGDOptions& options) { options.momentum(0.9).nesterov(true); };
  const auto dampening = [](SGDOptions& options) { options.momentum(0.9).dampening(0.3); };
  return {{"adamw", make_runner<AdamW, AdamWOptions, AdamWParamState>(0.011, defaults)},
          {"amsgrad", make_runner<AdamW, AdamWOptions, AdamWParamState>(0.011, amsgrad)},
          {"adam", make_runner<Adam, AdamOptions, AdamParamState>(0.012, defaults)},
          {"sgd", make_runner<SGD, SGDOptions, SGDParamState>(0.13, defaults)},
          {"sgd_nesterov", make_runner<SGD, SGDOptions, SGDParamState>(0.11, nesterov)},
          {"sgd_dampening", make_runner<SGD, SGDOptions, SGDParamState>(0.12, dampening)},
          {"lion", make_runner<Lion, LionOptions, LionParamState>(0.007, defaults)}};
}

/// Optimizers of libtorch, with hyperparameters for which ATen's products are exact.
std::vector<NamedOptimizer> torch_optimizers() {
  using torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState;
  const auto sgd = [](SGDOptions&) {};
  const auto momentum = [](SGDOptions& options) { options.momentum(0.5); };
  return {{"torch_sgd", make_runner<SGD, SGDOptions, SGDParamState>(0x1p-3, sgd)},
          {"torch_sgd_momentum", make_runner<SGD, SGDOptions, SGDParamState>(0x1p-3, momentum)},
          {"masters_sgd", make_runner<SGD, SGDOptions, SGDParamState, true>(0x1p-3, momentum)}};
}

const NamedOptimizer& find_optimizer(const std::vector<NamedOptimizer>& optimizers,
                                     const std::string& name) {
  for (const NamedOptimizer& optimizer : optimizers) {
    if (optimizer.name == name) return optimizer;
  }
  TORCH_CHECK(false, "no optimizer is named ", name);
}

/// Returns optimizer/weights/step mode.
std::string case_name(const NamedOptimizer& optimizer, const Case& test_case) {
  return optimizer.name + '/' + test_case.weights.name + '/' + test_case.mode.name;
}

struct NamedCase {
  std::string name;
  std::function<Line()> run;
};

class Cases {
 public:
  Cases() : mezzo_(mezzo_optimizers()), torch_(torch_optimizers()) {
    add_mezzo_optimizers();
    add_adamw_with_all_step_modes();
    add_special_cases();
    add_torch_optimizers();
  }
  const std::vector<NamedCase>& all() const { return all_; }

 private:
  void add(const NamedOptimizer& optimizer, const Case& test_case, const std::string& suffix = "") {
    const std::string name = case_name(optimizer, test_case) + suffix;
    for (const NamedCase& added : all_) {
      if (added.name == name) return;
    }
    all_.push_back({name, [run = optimizer.run, test_case] { return run(test_case); }});
  }

  /// Each optimizer with each weight storage, each with another step mode.
  void add_mezzo_optimizers() {
    const auto weights = all_weights();
    constexpr std::size_t kPairedStepModes = 9;
    for (std::size_t i = 0; i != mezzo_.size(); ++i) {
      for (std::size_t j = 0; j != weights.size(); ++j) {
        add(mezzo_[i], {weights[j], kStepModes[(i + j) % kPairedStepModes]});
      }
    }
    for (std::size_t j = 0; j != weights.size(); ++j) {  // further step modes
      if (j % 8 == mezzo_.size()) continue;
      add(mezzo_[j % 8], {weights[j], kStepModes[(8 + j) % kPairedStepModes]});
    }
  }

  void add_adamw_with_all_step_modes() {
    for (const char* weights : {"float", "bfloat16_master", "bfloat16_split", "mixed_master"}) {
      for (const StepMode& mode : kStepModes) add(mezzo_[0], {find_weights(weights), mode});
    }
  }

  void add_special_cases() {
    for (const char* weights : {"bfloat16_master", "bfloat16_split", "bfloat16_stochastic",
                                "float16_master", "mixed_master"}) {
      Case written{find_weights(weights), find_step_mode("norm")};
      written.writes_weights = true;
      add(mezzo_[0], written, "/written");
    }
    add(mezzo_[0], {find_weights("float"), find_step_mode("norm"), 65536.0}, "/power_of_two");
    add(mezzo_[0], {find_weights("float"), find_step_mode("norm"), 30000.0, 2}, "/hysteresis");
    add(find_optimizer(mezzo_, "sgd_dampening"),
        {find_weights("bfloat16_master"), find_step_mode("zero")});
  }

  void add_torch_optimizers() {
    for (const StepMode& mode : kStepModes) {
      if (!mode.has_scaler) continue;
      if (!mode.has_lr_factors) {
        add(find_optimizer(torch_, "torch_sgd"), {find_weights("float"), mode});
        add(find_optimizer(torch_, "torch_sgd"), {find_weights("double"), mode});
      }
      add(find_optimizer(torch_, "masters_sgd"), {with_masters("bfloat16"), mode});
    }
    add(find_optimizer(torch_, "torch_sgd"), {find_weights("bfloat16"), find_step_mode("norm")});
    add(find_optimizer(torch_, "torch_sgd_momentum"),
        {find_weights("float"), find_step_mode("norm_zero")});
    for (const char* mode : {"step", "norm", "unscale_norm", "norm_zero", "bare"}) {
      add(find_optimizer(torch_, "masters_sgd"), {with_masters("float16"), find_step_mode(mode)});
      add(find_optimizer(torch_, "masters_sgd"),
          {with_masters("mixed_master"), find_step_mode(mode)});
    }
    Case written{with_masters("bfloat16"), find_step_mode("norm")};
    written.writes_weights = true;
    add(find_optimizer(torch_, "masters_sgd"), written, "/written");
  }

  std::vector<NamedOptimizer> mezzo_;
  std::vector<NamedOptimizer> torch_;
  std::vector<NamedCase> all_;
};

TEST(GoldenBits, TrainingMatchesRecording) {
  const Line columns{"parameters", "state", "scales", "results", "gradients"};
  const std::vector<NamedCase> cases = Cases().all();
  if (const char* const new_path = std::getenv("MEZZO_RECORD_GOLDEN")) {
    std::ofstream file(new_path);
    file << "# case";
    for (const std::string& column : columns) file << ' ' << column;
    for (const NamedCase& named_case : cases) {
      file << '\n' << named_case.name;
      for (const std::string& word : named_case.run()) file << ' ' << word;
    }
    ASSERT_TRUE(file << std::endl) << "cannot write " << new_path;
    return;
  }
  std::ifstream file(MEZZO_GOLDEN_BITS);
  std::map<std::string, Line> recording;
  for (std::string text; std::getline(file, text);) {
    std::istringstream words(text);
    std::string name;
    words >> name;
    for (std::string word; words >> word;) recording[name].push_back(word);
  }
  recording.erase("#");
  for (const NamedCase& named_case : cases) {
    const Line expected = recording[named_case.name], line = named_case.run();
    recording.erase(named_case.name);
    ASSERT_EQ(expected.size(), columns.size()) << named_case.name << " is not recorded";
    for (std::size_t i = 0; i != line.size(); ++i) {
      EXPECT_EQ(line[i], expected[i]) << named_case.name << ": " << columns[i] << " differ";
    }
  }
  EXPECT_THAT(recording, testing::IsEmpty()) << "recorded cases that do not exist";
}

}  // namespace
}  // namespace golden
