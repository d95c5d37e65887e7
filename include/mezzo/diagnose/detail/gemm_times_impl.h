/// \file
/// From a model's products to their times.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/matmul_precision.h>
#include <mezzo/diagnose/gemm_times.h>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// The factors of mm, addmm, bmm and baddbmm, where they hold floating numbers.
inline std::optional<std::pair<at::Tensor, at::Tensor>> matrix_factors(std::string_view op,
                                                                       OpArguments inputs) {
  const bool adds = op == "aten::addmm" || op == "aten::baddbmm";
  if (!adds && op != "aten::mm" && op != "aten::bmm") return std::nullopt;
  const std::size_t left = adds ? 1 : 0;
  if (inputs.size() < left + 2 || !inputs[left].isTensor() || !inputs[left + 1].isTensor()) {
    return std::nullopt;
  }
  std::pair factors(inputs[left].toTensor(), inputs[left + 1].toTensor());
  if (!factors.first.is_floating_point()) return std::nullopt;
  return factors;
}

/// Notes the matrix products of a thread while it lives.
class GemmRecorder : public OpListener<GemmRecorder, bool> {
 public:
  GemmRecorder() {
    TORCH_CHECK(!is_nested(),
                "benchmark_gemms: it is called within another benchmark_gemms; call it outside of "
                "the model's forward");
  }

  using OpListener::stop;

  /// The products by shape, and how many there were of each.
  const std::map<GemmShape, int64_t>& calls() const noexcept { return calls_; }

  int64_t convolutions() const noexcept { return convolutions_; }

  /// Where all of them ran.
  c10::Device device() const {
    TORCH_CHECK(!devices_.empty(),
                "benchmark_gemms: the model called none of mm, addmm, bmm and baddbmm, which are "
                "timed, and ",
                convolutions_, " convolutions, which are not; use mezzo::compare_precisions");
    const c10::Device device = devices_.front();
    TORCH_CHECK(devices_.size() == 1, "benchmark_gemms: the model multiplies matrices on ", device,
                " and on ", devices_.back(), "; time its parts one by one");
    TORCH_CHECK(device.is_cpu() || device.is_cuda(),
                "benchmark_gemms: the model multiplies matrices on ", device,
                "; move it to cpu or cuda, where it can be timed");
    return device;
  }

 private:
  friend OpListener;

  /// \returns whether it is a product or convolution. Under autocast the op calls itself with the
  /// cast factors.
  bool entered(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (!name) return false;
    const bool is_convolution = name->name == "aten::_convolution";  // what all others call
    const auto factors = matrix_factors(name->name, recorded_inputs(function));
    if (!is_convolution && !factors) return false;
    if (depth_++ > 0) return true;
    if (is_convolution) ++convolutions_;
    if (factors) note(factors->first, factors->second);
    return true;
  }
  void left(bool is_counted) {
    if (is_counted) --depth_;
  }

  void note(const at::Tensor& left, const at::Tensor& right) {
    if (left.numel() == 0 || right.numel() == 0) return;
    ++calls_[{.batch = left.dim() == 3 ? left.size(0) : 1,
              .m = left.size(-2),
              .n = right.size(-1),
              .k = left.size(-1),
              .a_transposed = is_transposed(left),
              .b_transposed = is_transposed(right)}];
    if (std::find(devices_.begin(), devices_.end(), left.device()) == devices_.end()) {
      devices_.push_back(left.device());
    }
  }

  static bool is_transposed(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.stride(-2) == 1 && tensor.stride(-1) != 1 &&
           tensor.size(-1) > 1;
  }

  std::map<GemmShape, int64_t> calls_;
  std::vector<c10::Device> devices_;
  int64_t convolutions_ = 0;
  int depth_ = 0;
};

class GemmStopwatch {
 public:
  GemmStopwatch(c10::Device device, double seconds)
      : device_(device), seconds_(seconds), generator_(own_generator(device)) {}

  GemmMicroseconds time(const GemmShape& shape) const {
    GemmMicroseconds times;
    {
      const MatmulPrecisionGuard exact({.float32 = at::Float32MatmulPrecision::HIGHEST});
      times.float32 = time(shape, at::kFloat);
    }
    if (device_.is_cuda()) {
      const MatmulPrecisionGuard tf32({.float32 = at::Float32MatmulPrecision::HIGH});
      times.tf32 = time(shape, at::kFloat);
    }
    times.float16 = time(shape, at::kHalf);
    times.bfloat16 = time(shape, at::kBFloat16);
    return times;
  }

 private:
  static constexpr int kRounds = 5;  // at least

  /// The fastest of some rounds, each as many calls as fit, in microseconds a call: what else the
  /// machine does only ever adds. No wait between the calls of a round, as in a model; and no
  /// autocast, which does not touch ops that write to `out`.
  double time(const GemmShape& shape, at::ScalarType dtype) const {
    const at::Tensor a = matrix(shape.batch, shape.m, shape.k, shape.a_transposed, dtype);
    const at::Tensor b = matrix(shape.batch, shape.k, shape.n, shape.b_transposed, dtype);
    at::Tensor product = at::empty({shape.batch, shape.m, shape.n}, a.options());
    if (shape.batch == 1) {  // one batch of one is another kernel on some machines
      return time_calls([&, left = a[0], right = b[0], out = product[0]]() mutable {
        at::mm_out(out, left, right);
      });
    }
    return time_calls([&] { at::bmm_out(product, a, b); });
  }

  template <class Call>
  double time_calls(Call call) const {
    seconds_of(call, 1);  // whatever is set up at first use
    double fastest = seconds_of(call, 1);
    if (fastest > 10 * seconds_) return fastest * 1e6;
    double spent = 0;
    for (int round = 0; round < kRounds || spent < seconds_; ++round) {
      const auto calls = static_cast<int64_t>(std::clamp(seconds_ / kRounds / fastest, 1.0, 1e5));
      const double seconds = seconds_of(call, calls);
      spent += seconds;
      fastest = std::min(fastest, seconds / static_cast<double>(calls));
    }
    return fastest * 1e6;
  }

  template <class Call>
  double seconds_of(Call& call, int64_t calls) const {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) call();
    if (device_.is_cuda()) torch::cuda::synchronize(device_.index());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  at::Tensor matrix(int64_t batch, int64_t rows, int64_t columns, bool transposed,
                    at::ScalarType dtype) const {
    const auto options = at::TensorOptions().device(device_).dtype(at::kFloat);
    return transposed
               ? at::rand({batch, columns, rows}, generator_, options).to(dtype).transpose(1, 2)
               : at::rand({batch, rows, columns}, generator_, options).to(dtype);
  }

  /// The default generator is the model's: what follows a timing draws what it would without one.
  static at::Generator own_generator(c10::Device device) {
    at::Generator shared = at::globalContext().defaultGenerator(device);
    const std::scoped_lock lock(shared.mutex());
    return shared.clone();
  }

  c10::Device device_;
  double seconds_;
  at::Generator generator_;
};

inline GemmTimes timed(const GemmRecorder& recorder, const GemmTimingOptions& options) {
  const at::NoGradGuard no_grad;
  GemmTimes times{.device = recorder.device(), .rows = {}, .convolutions = recorder.convolutions()};
  const GemmStopwatch stopwatch(times.device, options.seconds);
  for (const auto& [shape, calls] : recorder.calls()) {
    GemmRow row{
        .shape = shape, .calls = calls, .as_is = stopwatch.time(shape), .padded = std::nullopt};
    if (shape.padded() != shape) row.padded = stopwatch.time(shape.padded());
    times.rows.push_back(row);
  }
  std::stable_sort(times.rows.begin(), times.rows.end(), [](const GemmRow& a, const GemmRow& b) {
    return a.as_is.float32 * static_cast<double>(a.calls) >
           b.as_is.float32 * static_cast<double>(b.calls);
  });
  return times;
}

}  // namespace detail

template <class Model, class Sample>
GemmTimes benchmark_gemms(Model&& model, const Sample& sample, const GemmTimingOptions& options) {
  TORCH_CHECK(options.seconds > 0 && !detail::nonfinite_bits(options.seconds),
              "benchmark_gemms: seconds is ", options.seconds,
              "; it should be positive and finite");
  detail::GemmRecorder recorder;
  {
    const at::NoGradGuard no_grad;
    if constexpr (requires { model->forward(sample); }) {
      model->forward(sample);
    } else {
      model(sample);
    }
  }
  recorder.stop();
  return detail::timed(recorder, options);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
