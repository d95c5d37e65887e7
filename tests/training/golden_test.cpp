// Compares what training steps compute with a recording, to the bit.
//
// golden_bits.txt has a line for each case: its name, which is optimizer/weights/way of stepping,
// and what 50 steps of it compute. The columns:
//
//   parameters   hash of the parameters after every step
//   state        hash of the moments, float masters and step counts after the last step
//   scales       hash of the loss scale after every step
//   results      hash of every StepResult
//   gradients    hash of `.grad` after every step; - for weights with masters after unscale_, where
//                `.grad` is a float tensor
//
// The bits are the same for every instruction set of mezzo's loops (tests/kernels compares these
// with each other), every number of threads, every compiler and every ATEN_CPU_CAPABILITY.
// Gradients are made by integer arithmetic, not by libtorch's kernels. Cases that step an optimizer
// of libtorch take rates, momenta and scales such that every product is exact, so that a fused
// multiply-add of ATen's changes no bit.
//
// A change that is meant to change bits records them anew, and says why in its commit:
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

/// FNV-1a of 64 bits.
class Hash {
 public:
  /// The dtype and the elements, in the order of their indices. Every NaN is the same one: which it
  /// is depends on the order of a product's factors. Undefined counts as well.
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

/// A number in [-1, 1) of 40 bits, and of one of eight magnitudes: splitmix64's mixing of `key`.
double value_of(uint64_t key) {
  uint64_t bits = key + 0x9e3779b97f4a7c15U;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  bits ^= bits >> 31;
  const auto mantissa = static_cast<int64_t>(bits >> 24) - (int64_t{1} << 39);
  return static_cast<double>(mantissa) * (0x1p-39 / static_cast<double>(1U << (bits & 7U)));
}

/// How the parameters of a case are stored; parameter i has the (i modulo size)-th of the dtypes.
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
          {"half", plain, {kHalf}, {kHalf}},
          {"half_master", fp32_master, {kHalf}, {kHalf}},
          {"float_of_bfloat16", plain, {kFloat}, {kBFloat16}},
          {"float_of_half", plain, {kFloat}, {kHalf}},
          {"double_of_float", plain, {kDouble}, {kFloat}},
          {"mixed_master",
           fp32_master,
           {kFloat, kBFloat16, kHalf, kDouble},
           {kFloat, kBFloat16, kHalf, kDouble}}};
}

Weights weights_named(const std::string& name) {
  for (const Weights& weights : all_weights()) {
    if (weights.name == name) return weights;
  }
  TORCH_CHECK(false, "no weights are named ", name);
}

/// Weights of 16 bits for which a MasterWeights keeps float masters.
Weights with_masters(const std::string& name) {
  Weights weights = weights_named(name);
  weights.storage = WeightStorage::fp32_master;
  return weights;
}

/// How a step is taken: by a scaler, unless it is bare.
struct Way {
  const char* name;
  bool unscales = false;    ///< by scaler.unscale_(optimizer), in a call of its own before the step
  bool is_clipped = false;  ///< by {.max_norm = 1}
  bool zeroes = false;      ///< by {.zero_grad = true}
  bool clamps = false;      ///< gradients, to 0.05, before the step
  bool is_disabled = false;
  bool is_bare = false;    ///< optimizer.step()
  bool has_table = false;  ///< of learning rates
};

constexpr Way kWays[] = {
    {.name = "step"},
    {.name = "norm", .is_clipped = true},
    {.name = "norm_zero", .is_clipped = true, .zeroes = true},
    {.name = "unscale", .unscales = true},
    {.name = "unscale_norm", .unscales = true, .is_clipped = true},
    {.name = "unscale_value", .unscales = true, .clamps = true},
    {.name = "disabled", .is_clipped = true, .is_disabled = true},
    {.name = "bare", .is_bare = true},
    {.name = "table", .is_clipped = true, .has_table = true},
    {.name = "zero", .zeroes = true},
    {.name = "unscale_norm_zero", .unscales = true, .is_clipped = true, .zeroes = true}};

Way way_named(std::string_view name) {
  for (const Way& way : kWays) {
    if (way.name == name) return way;
  }
  TORCH_CHECK(false, "no way of stepping is named ", name);
}

struct Case {
  Weights weights;
  Way way;
  double init_scale = 30000;  ///< no power of two, so that multiplying by its inverse rounds
  int64_t hysteresis = 1;
  bool writes_weights = false;  ///< somebody else writes some of the weights between two steps
};

/// The columns of a case's line in a recording.
using Line = std::vector<std::string>;

// Parameter 4 is channels_last, parameter 5 has no gradient in every third step. Parameter 3 is cut
// into two pieces by mezzo's loops.
constexpr std::size_t kParameters = 7;
constexpr std::size_t kSometimesWithoutGradient = 5;

Tensor values_like(const std::vector<int64_t>& shape, torch::ScalarType dtype, uint64_t key,
                   double factor) {
  const Tensor values = torch::empty(shape, torch::kDouble);
  double* const to = values.mutable_data_ptr<double>();
  for (int64_t j = 0; j != values.numel(); ++j) {
    to[j] = value_of(key + static_cast<uint64_t>(j)) * factor;
  }
  return dtype == torch::kDouble ? values : values.to(torch::kFloat).to(dtype);
}

std::vector<int64_t> shape_of(std::size_t i) {
  const std::vector<int64_t> shapes[kParameters] = {{1},          {7},  {300}, {16385 + 3},
                                                    {2, 3, 4, 5}, {33}, {5, 9}};
  return shapes[i];
}

std::vector<Tensor> make_parameters(const Weights& weights) {
  std::vector<Tensor> parameters;
  for (std::size_t i = 0; i != kParameters; ++i) {
    const auto dtype = weights.parameters[i % weights.parameters.size()];
    Tensor values = values_like(shape_of(i), dtype, uint64_t{i} << 32, 1.0);
    if (i == 4) values = values.contiguous(torch::MemoryFormat::ChannelsLast);
    parameters.push_back(values.detach().requires_grad_());
  }
  return parameters;
}

/// Of two groups: the parameters with even and those with odd numbers.
std::vector<Tensor> group_of(const std::vector<Tensor>& parameters, std::size_t group) {
  std::vector<Tensor> own;
  for (std::size_t i = group; i < parameters.size(); i += 2) own.push_back(parameters[i]);
  return own;
}

/// Their norm is about 18 times the bound of clipping, and in each fourth step below it.
void set_gradients(const std::vector<Tensor>& parameters, const Case& of, int step, double scale) {
  const bool has_overflows = !of.way.is_disabled && !of.way.is_bare;
  for (std::size_t i = 0; i != kParameters; ++i) {
    Tensor parameter = parameters[i];
    if (i == kSometimesWithoutGradient && step % 3 == 2) {
      parameter.mutable_grad() = Tensor();
      continue;
    }
    const auto dtype = of.weights.gradients[i % of.weights.gradients.size()];
    const uint64_t key = uint64_t{i + kParameters * static_cast<std::size_t>(step + 1)} << 32;
    Tensor gradient =
        values_like(shape_of(i), dtype, key, scale * (step % 4 == 3 ? 0x1p-8 : 0x1p-2));
    if (has_overflows && i == static_cast<std::size_t>(step) % 5) {
      Tensor last = gradient.view(-1).slice(0, -1);
      if (step % 7 == 6) last.fill_(std::numeric_limits<double>::infinity());
      if (step % 13 == 12) last.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    if (i == 4 && step % 2 == 0) gradient = gradient.contiguous(torch::MemoryFormat::ChannelsLast);
    parameter.mutable_grad() = gradient;
  }
}

/// An optimizer of libtorch's or mezzo's; with kMasters, of libtorch's behind a MasterWeights.
template <class Optimizer, class Options, class State, bool kMasters = false>
class Subject {
 public:
  /// `lr` is the first group's; `finish` sets what is the optimizer's own.
  template <class Finish>
  Subject(const std::vector<Tensor>& parameters, const Case& of, double lr, const Finish& finish)
      : parameters_(parameters), inner_(make(groups(parameters, lr, finish), of, lr)) {
    if constexpr (kMasters) masters_.emplace(inner_);
    if constexpr (requires { stepped().set_lr_factors({}); }) {
      if (of.way.has_table) stepped().set_lr_factors({0.25, 0.5, 1.0, 1.0, 0.5, 2.0, 0.125});
    }
  }

  auto& stepped() {
    if constexpr (kMasters) {
      return *masters_;
    } else {
      return inner_;
    }
  }

  void halve_rate(std::size_t group) {
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
                        [[maybe_unused]] const Case& of, double lr) {
    if constexpr (requires(Optimizer of_mezzo) { of_mezzo.weight_storage_options(); }) {
      return Optimizer(groups, Options(lr), {.weight_storage = of.weights.storage, .seed = 11});
    } else {
      return Optimizer(groups, Options(lr));
    }
  }
  template <class Finish>
  static std::vector<torch::optim::OptimizerParamGroup> groups(
      const std::vector<Tensor>& parameters, double lr, const Finish& finish) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (std::size_t group = 0; group != 2; ++group) {
      Options options(group == 0 ? lr : lr / 4);
      options.weight_decay(group == 0 ? 0x1p-5 : 0x1p-8);
      finish(options);
      groups.emplace_back(group_of(parameters, group), std::make_unique<Options>(options));
    }
    return groups;
  }

  std::vector<Tensor> parameters_;
  Optimizer inner_;
  std::optional<mezzo::MasterWeights> masters_;
};

mezzo::GradScaler make_scaler(const Case& of) {
  mezzo::GradScaler scaler({.init_scale = of.init_scale,
                            .growth_interval = 5,
                            .enabled = !of.way.is_disabled,
                            .hysteresis = of.hysteresis,
                            .allow_fp16_gradients = of.weights.storage == WeightStorage::plain});
  scaler.on_skip(nullptr);
  return scaler;
}

void add_result(const mezzo::StepResult& result, Hash& hash) {
  for (const double number :
       std::initializer_list<double>{result.applied() ? 1.0 : 0.0, result.found_inf() ? 1.0 : 0.0,
                                     result.scale(), result.grad_norm().value_or(-1.0)}) {
    hash.add(number);
  }
}

template <class Optimizer>
mezzo::StepResult scaler_step(const std::vector<Tensor>& parameters, mezzo::GradScaler& scaler,
                              Optimizer& optimizer, Way way) {
  if (way.unscales) scaler.unscale_(optimizer);
  if (way.clamps) torch::nn::utils::clip_grad_value_(parameters, 0.05);
  mezzo::StepOptions options{.zero_grad = way.zeroes};
  if (way.is_clipped) options.max_norm = 1.0;
  return scaler.step(optimizer, options);
}

struct Hashes {
  Hash parameters, scales, results, gradients;
};

template <class Optimizer>
void take_step(const std::vector<Tensor>& parameters, mezzo::GradScaler& scaler,
               Optimizer& optimizer, const Case& of, int step, Hashes& hashes) {
  set_gradients(parameters, of, step, of.way.is_bare ? 1.0 : scaler.get_scale());
  const Tensor loss = torch::ones({});
  std::optional<mezzo::StepResult> result;
  if (of.way.is_bare) {
    optimizer.step();
  } else {
    (void)scaler.scale(loss);
    result = scaler_step(parameters, scaler, optimizer, of.way);
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

/// Where a weight has a master, `.grad` after a call that unscales it may be of either dtype.
bool compares_gradients(const Case& of) { return !(of.weights.has_masters() && of.way.unscales); }

/// What `make(parameters)`, a Subject, computes: the columns of golden_bits.txt.
template <class Make>
Line line_of(const Case& of, const Make& make) {
  const std::vector<Tensor> parameters = make_parameters(of.weights);
  auto subject = make(parameters);
  mezzo::GradScaler scaler = make_scaler(of);
  Hashes hashes;
  for (int step = 0; step != kSteps; ++step) {
    if (step == 30) subject->halve_rate(1);
    if (step == 33 && of.writes_weights) write_weights(parameters);
    take_step(parameters, scaler, subject->stepped(), of, step, hashes);
  }
  for (const Tensor& parameter : parameters) {
    EXPECT_TRUE(parameter.isfinite().all().item<bool>()) << "a NaN hides later bits";
  }
  Hash state;
  subject->add_state_to(state);
  return {hashes.parameters.text(), state.text(), hashes.scales.text(), hashes.results.text(),
          compares_gradients(of) ? hashes.gradients.text() : "-"};
}

template <class Optimizer, class Options, class State, bool kMasters = false, class Finish>
std::function<Line(const Case&)> subject_of(double lr, const Finish& finish) {
  return [=](const Case& of) {
    return line_of(of, [&](const std::vector<Tensor>& parameters) {
      using Own = Subject<Optimizer, Options, State, kMasters>;
      return std::make_unique<Own>(parameters, of, lr, finish);
    });
  };
}

struct NamedOptimizer {
  std::string name;
  std::function<Line(const Case&)> run;
};

std::vector<NamedOptimizer> mezzos() {
  using namespace mezzo::optim;
  const auto nothing = [](auto&) {};
  const auto amsgrad = [](AdamWOptions& options) { options.amsgrad(true); };
  const auto nesterov = [](SGDOptions& options) { options.momentum(0.9).nesterov(true); };
  const auto dampening = [](SGDOptions& options) { options.momentum(0.9).dampening(0.3); };
  return {{"adamw", subject_of<AdamW, AdamWOptions, AdamWParamState>(0.011, nothing)},
          {"amsgrad", subject_of<AdamW, AdamWOptions, AdamWParamState>(0.011, amsgrad)},
          {"adam", subject_of<Adam, AdamOptions, AdamParamState>(0.012, nothing)},
          {"sgd", subject_of<SGD, SGDOptions, SGDParamState>(0.13, nothing)},
          {"sgd_nesterov", subject_of<SGD, SGDOptions, SGDParamState>(0.11, nesterov)},
          {"sgd_dampening", subject_of<SGD, SGDOptions, SGDParamState>(0.12, dampening)},
          {"lion", subject_of<Lion, LionOptions, LionParamState>(0.007, nothing)}};
}

/// Optimizers of libtorch, with numbers that make ATen's products exact (see golden_test.cpp).
std::vector<NamedOptimizer> libtorchs() {
  using torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState;
  const auto sgd = [](SGDOptions&) {};
  const auto momentum = [](SGDOptions& options) { options.momentum(0.5); };
  return {{"torch_sgd", subject_of<SGD, SGDOptions, SGDParamState>(0x1p-3, sgd)},
          {"torch_sgd_momentum", subject_of<SGD, SGDOptions, SGDParamState>(0x1p-3, momentum)},
          {"masters_sgd", subject_of<SGD, SGDOptions, SGDParamState, true>(0x1p-3, momentum)}};
}

const NamedOptimizer& named(const std::vector<NamedOptimizer>& recipes, const std::string& name) {
  for (const NamedOptimizer& one : recipes) {
    if (one.name == name) return one;
  }
  TORCH_CHECK(false, "no optimizer is named ", name);
}

/// optimizer/weights/way
std::string name_of(const NamedOptimizer& optimizer, const Case& of) {
  return optimizer.name + '/' + of.weights.name + '/' + of.way.name;
}

struct NamedCase {
  std::string name;
  std::function<Line()> run;
};

class Cases {
 public:
  Cases() : mezzos_(mezzos()), libtorchs_(libtorchs()) {
    every_pair_of_optimizer_weights_and_way();
    adamw_in_every_way();
    rare_cases();
    steps_of_libtorch();
  }
  const std::vector<NamedCase>& all() const { return all_; }

 private:
  void add(const NamedOptimizer& optimizer, const Case& of, const std::string& more = "") {
    const std::string name = name_of(optimizer, of) + more;
    for (const NamedCase& one : all_) {
      if (one.name == name) return;
    }
    all_.push_back({name, [run = optimizer.run, of] { return run(of); }});
  }

  void every_pair_of_optimizer_weights_and_way() {
    const auto weights = all_weights();
    constexpr std::size_t kWaysToPair = 9;
    for (std::size_t i = 0; i != mezzos_.size(); ++i) {
      for (std::size_t j = 0; j != weights.size(); ++j) {
        add(mezzos_[i], {weights[j], kWays[(i + j) % kWaysToPair]});
      }
    }
    for (std::size_t j = 0; j != weights.size(); ++j) {  // some ways that are left
      if (j % 8 == mezzos_.size()) continue;
      add(mezzos_[j % 8], {weights[j], kWays[(8 + j) % kWaysToPair]});
    }
  }

  void adamw_in_every_way() {
    for (const char* weights : {"float", "bfloat16_master", "bfloat16_split", "mixed_master"}) {
      for (const Way& way : kWays) add(mezzos_[0], {weights_named(weights), way});
    }
  }

  void rare_cases() {
    for (const char* weights : {"bfloat16_master", "bfloat16_split", "bfloat16_stochastic",
                                "half_master", "mixed_master"}) {
      Case written{weights_named(weights), way_named("norm")};
      written.writes_weights = true;
      add(mezzos_[0], written, "/written");
    }
    add(mezzos_[0], {weights_named("float"), way_named("norm"), 65536.0}, "/power_of_two");
    add(mezzos_[0], {weights_named("float"), way_named("norm"), 30000.0, 2}, "/hysteresis");
    add(named(mezzos_, "sgd_dampening"), {weights_named("bfloat16_master"), way_named("zero")});
  }

  void steps_of_libtorch() {
    for (const Way& way : kWays) {
      if (way.is_bare) continue;
      if (!way.has_table) {
        add(named(libtorchs_, "torch_sgd"), {weights_named("float"), way});
        add(named(libtorchs_, "torch_sgd"), {weights_named("double"), way});
      }
      add(named(libtorchs_, "masters_sgd"), {with_masters("bfloat16"), way});
    }
    add(named(libtorchs_, "torch_sgd"), {weights_named("bfloat16"), way_named("norm")});
    add(named(libtorchs_, "torch_sgd_momentum"), {weights_named("float"), way_named("norm_zero")});
    for (const char* way : {"step", "norm", "unscale_norm", "norm_zero", "bare"}) {
      add(named(libtorchs_, "masters_sgd"), {with_masters("half"), way_named(way)});
      add(named(libtorchs_, "masters_sgd"), {with_masters("mixed_master"), way_named(way)});
    }
    Case written{with_masters("bfloat16"), way_named("norm")};
    written.writes_weights = true;
    add(named(libtorchs_, "masters_sgd"), written, "/written");
  }

  std::vector<NamedOptimizer> mezzos_;
  std::vector<NamedOptimizer> libtorchs_;
  std::vector<NamedCase> all_;
};

TEST(GoldenBits, TrainingMatchesRecording) {
  const Line columns{"parameters", "state", "scales", "results", "gradients"};
  const std::vector<NamedCase> cases = Cases().all();
  if (const char* const new_path = std::getenv("MEZZO_RECORD_GOLDEN")) {
    std::ofstream file(new_path);
    file << "# case";
    for (const std::string& column : columns) file << ' ' << column;
    for (const NamedCase& one : cases) {
      file << '\n' << one.name;
      for (const std::string& word : one.run()) file << ' ' << word;
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
  for (const NamedCase& one : cases) {
    const Line expected = recording[one.name], line = one.run();
    recording.erase(one.name);
    ASSERT_EQ(expected.size(), columns.size()) << one.name << " is not recorded";
    for (std::size_t i = 0; i != line.size(); ++i) {
      EXPECT_EQ(line[i], expected[i]) << one.name << ": " << columns[i] << " differ";
    }
  }
  EXPECT_THAT(recording, testing::IsEmpty()) << "recorded, and no case";
}

}  // namespace
}  // namespace golden
