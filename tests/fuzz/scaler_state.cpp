#include <mezzo/scaling/grad_scaler.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <string>

#include "targets.h"

namespace fuzz {
namespace {

using StateDict = mezzo::GradScaler::StateDict;

double take_number(std::string_view& bytes) {
  std::uint64_t bits = 0;
  switch (const unsigned char kind = take_byte(bytes); kind % 4) {
    case 0:  // any double, including NaN and subnormal numbers
      for (int i = 0; i < 8; ++i) bits = bits << 8 | take_byte(bytes);
      break;
    case 1:  // a power of two
      return std::ldexp(1.0, take_byte(bytes) * 9 - 1150);
    case 2:
      return take_byte(bytes) - 3;
    default:
      return kind / 4 % 2 == 0 ? 1.0 + take_byte(bytes) / 64.0 : take_byte(bytes) / 256.0;
  }
  double number = 0;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

StateDict take_state(std::string_view& bytes) {
  StateDict state = mezzo::GradScaler().state_dict();
  constexpr std::array<const char*, 11> kKeys{
      "scale",      "growth_factor", "backoff_factor", "growth_interval",     "_growth_tracker",
      "min_scale",  "max_scale",     "hysteresis",     "_hysteresis_tracker", "_loss_scale_mode",
      "unknown key"};
  for (int edits = take_byte(bytes) % 16; edits > 0; --edits) {
    const unsigned char which = take_byte(bytes);
    const char* const key = kKeys[which % kKeys.size()];
    if (which >= 240) {
      state.erase(key);
    } else {
      state[key] = take_number(bytes);
    }
  }
  return state;
}

at::Tensor take_tensor(std::string_view& bytes, double value) {
  constexpr std::array kDtypes{at::kDouble, at::kDouble,      at::kFloat, at::kLong,
                               at::kHalf,   at::kBFloat16,    at::kInt,   at::kByte,
                               at::kBool,   at::kComplexFloat};
  const auto dtype = kDtypes[take_byte(bytes) % kDtypes.size()];
  const unsigned char shape = take_byte(bytes);
  if (shape == 255) return {};
  const auto sizes = shape < 200   ? std::vector<std::int64_t>{}
                     : shape < 230 ? std::vector<std::int64_t>{1, 1}
                     : shape < 240 ? std::vector<std::int64_t>{0}
                                   : std::vector<std::int64_t>{shape};
  return at::full(sizes, value, at::kDouble).to(dtype);
}

bool bitwise_equal(const StateDict& left, const StateDict& right) {
  return left.size() == right.size() &&
         std::equal(left.begin(), left.end(), right.begin(), [](const auto& a, const auto& b) {
           return a.first == b.first && std::memcmp(&a.second, &b.second, sizeof(double)) == 0;
         });
}

/// Steps whose overflow is decided by the bytes.
void train(mezzo::GradScaler& scaler, std::string_view bytes) {
  const auto weight = at::zeros({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(1e-30));
  const auto before = scaler.state_dict();
  for (int i = 0; i < 12; ++i) {
    const double scale = scaler.get_scale();
    // With a min_scale of 0, as in torch, the scale may underflow to 0.
    require(std::isfinite(scale) && (scale > 0 || before.at("min_scale") == 0),
            "the scale is finite, and positive if min_scale is");
    require(scale >= before.at("min_scale") || scale <= before.at("max_scale"),
            "the scale is within its bounds");
    const bool is_bad = take_byte(bytes) % 2 == 1;
    weight.mutable_grad() =
        at::full({2}, is_bad ? std::numeric_limits<double>::quiet_NaN() : 0.0, at::kFloat);
    static_cast<void>(scaler.scale(at::zeros({})));
    scaler.step(optimizer);
    scaler.update();
    require(at::isfinite(weight).all().item<bool>(), "no weight is inf or NaN");
  }
}

}  // namespace

/// Loads a state dict, or an archive of one. A state that does not load changes nothing. The scaler
/// then trains in either case.
void scaler_state(std::string_view bytes) {
  const unsigned char mode = take_byte(bytes);
  mezzo::GradScaler scaler;
  scaler.on_skip(nullptr);
  if (mode % 2 == 1) static_cast<void>(scaler.scale(at::zeros({})));  // the state is on a device
  if (mode % 2 == 1) scaler.set_growth_interval(7);
  const StateDict before = scaler.state_dict();
  const StateDict state = take_state(bytes);
  bool is_loaded = true;
  try {
    std::map<std::string, at::Tensor> tensors;
    for (const auto& [key, value] : state) tensors[key] = take_tensor(bytes, value);
    switch (mode / 2 % 4) {
      case 0:
      case 1:
        scaler.load_state_dict(state);
        break;
      default: {
        torch::serialize::OutputArchive output;
        for (const auto& [key, tensor] : tensors) {
          if (tensor.defined() && key != "unknown key") output.write(key, tensor, true);
        }
        std::stringstream stream;
        output.save_to(stream);
        torch::serialize::InputArchive input;
        input.load_from(stream);
        input >> scaler;
      }
    }
  } catch (const c10::Error&) {
    is_loaded = false;
  }
  if (!is_loaded) {
    require(bitwise_equal(scaler.state_dict(), before),
            "a state that does not load changes nothing");
  }
  train(scaler, bytes);
}

}  // namespace fuzz
