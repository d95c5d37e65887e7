// Replays sequences of calls that record_torch_sequences.py recorded from torch.amp.GradScaler:
// scales, trackers, gradients and parameters must be bitwise identical, error messages equal.

#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Words = std::vector<std::string>;

template <class Float, class Bits>
Float from_bits(const std::string& word) {
  return std::bit_cast<Float>(static_cast<Bits>(std::stoull(word, nullptr, 16)));
}
float float_of(const std::string& word) { return from_bits<float, uint32_t>(word); }
double double_of(const std::string& word) { return from_bits<double, uint64_t>(word); }

template <class Bits>
std::string hexadecimal(Bits bits) {
  std::ostringstream text;
  text.width(2 * sizeof(Bits));
  text.fill('0');
  text << std::hex << bits;
  return text.str();
}
std::string word_of(float value) { return hexadecimal(std::bit_cast<uint32_t>(value)); }
std::string word_of(double value) { return hexadecimal(std::bit_cast<uint64_t>(value)); }

// NaN payloads are unspecified.
void append_words(const torch::Tensor& tensor, Words& words) {
  const bool is_double = tensor.scalar_type() == torch::kDouble;
  const auto dense = tensor.detach().to_dense().to(torch::kDouble).contiguous();
  const double* values = dense.const_data_ptr<double>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    if (std::isnan(values[i])) {
      words.push_back("nan");
    } else {
      words.push_back(is_double ? word_of(values[i]) : word_of(static_cast<float>(values[i])));
    }
  }
}

Words without_nan_payloads(Words words) {
  for (std::string& word : words) {
    const bool is_nan = (word.size() == 8 && std::isnan(float_of(word))) ||
                        (word.size() == 16 && std::isnan(double_of(word)));
    if (is_nan) word = "nan";
  }
  return words;
}

/// Sparse additions parallelize even three elements, which takes most of the time.
class OneThread {
 public:
  OneThread() { torch::set_num_threads(1); }
  ~OneThread() { torch::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = torch::get_num_threads();
};

class CountingSgd : public torch::optim::SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override {
    ++steps;
    return SGD::step(closure);
  }
  int steps = 0;
};

/// The scaler and optimizers of a sequence.
class Player {
 public:
  explicit Player(const Words& words)
      : options_{.init_scale = double_of(words.at(0)),
                 .growth_factor = double_of(words.at(1)),
                 .backoff_factor = double_of(words.at(2)),
                 .growth_interval = std::stoll(words.at(3)),
                 .enabled = words.at(4) == "1",
                 .min_scale = 0} {
    parameters_ = {{zeros({2}, torch::kFloat)},
                   {zeros({3}, torch::kFloat), zeros({2}, torch::kBFloat16)},
                   {zeros({1}, torch::kDouble), zeros({3, 1}, torch::kFloat)},
                   {zeros({1}, torch::kHalf)}};
    for (const auto& group : parameters_) {
      optimizers_.push_back(std::make_unique<CountingSgd>(group, torch::optim::SGDOptions(0.25)));
    }
    renew();
  }

  Words call(const std::string& name, const Words& arguments) {
    if (name == "gradients") return set_gradients(arguments);
    if (name == "scale") return scale(arguments);
    if (name == "unscale") return unscale(index(arguments));
    if (name == "step") return step(index(arguments));
    if (name == "closure") return step_with_closure(index(arguments));
    if (name == "save") return save();
    if (name == "archive") return archive();
    if (name == "renew") return renew();
    if (name == "load") return (scaler_->load_state_dict(saved_), Words{});
    if (name == "load_empty") return (scaler_->load_state_dict({}), Words{});
    if (name == "growth_interval") {
      return (scaler_->set_growth_interval(std::stoll(arguments.at(0))), Words{});
    }
    if (name == "growth_factor") {
      return (scaler_->set_growth_factor(double_of(arguments.at(0))), Words{});
    }
    if (name == "backoff_factor") {
      return (scaler_->set_backoff_factor(double_of(arguments.at(0))), Words{});
    }
    return update(name, arguments);
  }

  std::string state() const {
    const auto state = scaler_->state_dict();
    const double tracker = state.empty() ? 0 : state.at("_growth_tracker");
    return word_of(static_cast<float>(scaler_->get_scale())) + " " +
           std::to_string(static_cast<int64_t>(tracker));
  }

 private:
  static torch::Tensor zeros(torch::IntArrayRef shape, torch::ScalarType dtype) {
    return torch::zeros(shape, torch::dtype(dtype).requires_grad(true));
  }
  static std::size_t index(const Words& arguments) { return std::stoul(arguments.at(0)); }

  Words renew() {
    scaler_ = std::make_unique<mezzo::GradScaler>(options_);
    scaler_->on_skip(nullptr);
    return {};
  }

  Words set_gradients(const Words& arguments) {
    auto word = arguments.begin() + 1;
    for (torch::Tensor& parameter : parameters_.at(index(arguments))) {
      if (*word == "none") {
        parameter.mutable_grad() = torch::Tensor();
        ++word;
        continue;
      }
      std::vector<double> numbers;
      for (int64_t i = 0; i < parameter.numel(); ++i, ++word) {
        numbers.push_back(word->size() == 16 ? double_of(*word) : float_of(*word));
      }
      const auto values = torch::tensor(numbers, torch::kDouble)
                              .to(parameter.scalar_type())
                              .reshape(parameter.sizes());
      const bool is_sparse = parameter.dim() == 2;
      parameter.mutable_grad() = is_sparse ? sparse(values) : values;
    }
    return {};
  }
  static torch::Tensor sparse(const torch::Tensor& values) {
    const auto indices = torch::arange(values.size(0)).unsqueeze(0);
    return torch::sparse_coo_tensor(indices, values, values.sizes());
  }

  Words scale(const Words& arguments) {
    Words result;
    append_words(scaler_->scale(torch::tensor(float_of(arguments.at(0)))), result);
    return result;
  }

  Words unscale(std::size_t optimizer) {
    scaler_->unscale_(*optimizers_.at(optimizer));
    Words result;
    for (const torch::Tensor& parameter : parameters_.at(optimizer)) {
      if (parameter.grad().defined()) {
        append_words(parameter.grad(), result);
      } else {
        result.push_back("none");
      }
    }
    return result;
  }

  Words step(std::size_t index) {
    CountingSgd& optimizer = *optimizers_.at(index);
    const int before = optimizer.steps;
    const auto outcome = scaler_->step(optimizer);
    EXPECT_EQ(outcome.applied(), optimizer.steps == before + 1);
    Words result{std::to_string(optimizer.steps - before)};
    for (const torch::Tensor& parameter : parameters_.at(index)) append_words(parameter, result);
    return result;
  }

  Words step_with_closure(std::size_t index) {
    scaler_->step(*optimizers_.at(index), [] { return torch::Tensor(); });
    return {};
  }

  Words update(const std::string& name, const Words& arguments) {
    if (name == "update") {
      scaler_->update();
    } else if (name == "update_to") {
      scaler_->update(double_of(arguments.at(0)));
    } else if (name == "update_to_tensor") {
      scaler_->update(torch::tensor(float_of(arguments.at(0))));
    } else if (name == "update_to_two") {
      scaler_->update(torch::ones({2}));
    } else if (name == "update_to_variable") {
      scaler_->update(torch::ones({1}, torch::requires_grad()));
    } else {
      throw std::runtime_error("the recording has an unknown call: " + name);
    }
    return {};
  }

  Words save() {
    saved_ = scaler_->state_dict();
    if (saved_.empty()) return {"empty"};
    return {word_of(saved_.at("growth_factor")), word_of(saved_.at("backoff_factor")),
            std::to_string(static_cast<int64_t>(saved_.at("growth_interval")))};
  }

  Words archive() {
    std::stringstream stream;
    torch::save(*scaler_, stream);
    renew();
    torch::load(*scaler_, stream);
    return {};
  }

  mezzo::GradScalerOptions options_;
  std::vector<std::vector<torch::Tensor>> parameters_;
  std::vector<std::unique_ptr<CountingSgd>> optimizers_;
  std::unique_ptr<mezzo::GradScaler> scaler_;
  mezzo::GradScaler::StateDict saved_;
};

/// A line of the recording: `call arguments... [> result...] | state`.
struct Line {
  explicit Line(const std::string& text) {
    const auto bar = text.find(" | ");
    if (bar != std::string::npos) state = text.substr(bar + 3);
    std::istringstream words(text.substr(0, bar));
    words >> call;
    Words* part = &arguments;
    for (std::string word; words >> word;) {
      if (word == ">") {
        part = &result;
      } else {
        part->push_back(word);
      }
    }
  }
  std::string call;
  Words arguments;
  Words result;
  std::string state;
};

// Prefixes of 1,000 random sequences that contain every pair of consecutive calls and outcomes.
TEST(GradScalerTorchParity, MatchesRecordedSequences) {
  std::ifstream recording(MEZZO_TORCH_SEQUENCES);
  const OneThread one_thread;
  ASSERT_TRUE(recording) << "cannot read " << MEZZO_TORCH_SEQUENCES;
  std::map<std::string, std::string> errors;
  std::unique_ptr<Player> player;
  int sequences = 0;
  int64_t number = 0;
  for (std::string text; std::getline(recording, text);) {
    ++number;
    const Line line(text);
    if (line.call == "#") continue;
    if (line.call == "error") {
      const auto message = text.find(' ', sizeof("error"));
      errors["!" + line.arguments.at(0)] = text.substr(message + 1);
      continue;
    }
    if (line.call == "sequence") {
      player = std::make_unique<Player>(line.arguments);
      ++sequences;
      continue;
    }
    const std::string where = "line " + std::to_string(number) + ": " + text;
    const bool is_error = !line.result.empty() && line.result.front().front() == '!';
    try {
      const Words result = player->call(line.call, line.arguments);
      ASSERT_FALSE(is_error) << where << "\nexpected: " << errors.at(line.result.front());
      ASSERT_EQ(result, without_nan_payloads(line.result)) << where;
    } catch (const c10::Error& error) {
      ASSERT_TRUE(is_error) << where << "\n" << error.what_without_backtrace();
      ASSERT_THAT(error.what_without_backtrace(),
                  testing::StartsWith(errors.at(line.result.front())))
          << where;
    }
    ASSERT_EQ(player->state(), line.state) << where;
  }
  EXPECT_EQ(sequences, 149);
}

}  // namespace
