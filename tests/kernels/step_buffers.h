#pragma once

#include <mezzo/kernels/optimizer_step_cpu.h>

#include <torch/types.h>

#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../support/bitwise_equal.h"
#include "../support/isa_name.h"

/// The dtypes of a parameter and its gradient.
struct DtypePair {
  torch::ScalarType parameter;
  torch::ScalarType gradient;
};

inline constexpr std::array<DtypePair, 9> kDtypePairs{{{torch::kFloat, torch::kFloat},
                                                       {torch::kFloat, torch::kBFloat16},
                                                       {torch::kFloat, torch::kHalf},
                                                       {torch::kDouble, torch::kDouble},
                                                       {torch::kDouble, torch::kFloat},
                                                       {torch::kBFloat16, torch::kBFloat16},
                                                       {torch::kBFloat16, torch::kFloat},
                                                       {torch::kHalf, torch::kHalf},
                                                       {torch::kHalf, torch::kFloat}}};

inline std::string name_of(const DtypePair& dtypes) {
  return std::string(torch::toString(dtypes.parameter)) + torch::toString(dtypes.gradient);
}

/// A parameter with its gradient and moments.
struct StepBuffers {
  torch::Tensor parameter;
  torch::Tensor gradient;
  std::array<torch::Tensor, mezzo::detail::kMaxMoments> moments;

  static StepBuffers random(const DtypePair& dtypes, int64_t count) {
    const auto values = [&](double spread) {
      return torch::randn({count}, torch::kDouble) * spread;
    };
    return of(dtypes, values(1), values(2), values(0.1), values(0.1).abs(), values(0.1).abs());
  }

  /// All pairs of extreme values (zeros, subnormals, max, inf, NaN) as parameter and gradient.
  static StepBuffers edges(const DtypePair& dtypes) {
    const double infinity = std::numeric_limits<double>::infinity();
    const auto edges = torch::tensor(
        {0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8, 1e-5, 1e-40, -1e-45, 1e-300, 65504.0, -65504.0, 3.3e38,
         1e300, infinity, -infinity, std::numeric_limits<double>::quiet_NaN()},
        torch::kDouble);
    const int64_t count = edges.numel();
    const auto outer = edges.repeat_interleave(count);
    const auto inner = edges.repeat({count});
    return of(dtypes, outer, inner, inner * 0.5, inner.abs() * 0.25, outer.abs() * 0.125);
  }

  StepBuffers clone() const {
    return {parameter.clone(),
            gradient.clone(),
            {moments[0].clone(), moments[1].clone(), moments[2].clone()}};
  }

  std::vector<torch::Tensor> tensors() const {
    return {parameter, gradient, moments[0], moments[1], moments[2]};
  }

  mezzo::detail::ParamPointers pointers() {
    return {parameter.data_ptr(),
            gradient.data_ptr(),
            {moments[0].data_ptr(), moments[1].data_ptr(), moments[2].data_ptr()},
            parameter.numel()};
  }

 private:
  static StepBuffers of(const DtypePair& dtypes, const torch::Tensor& parameter,
                        const torch::Tensor& gradient, const torch::Tensor& first,
                        const torch::Tensor& second, const torch::Tensor& third) {
    return {parameter.to(dtypes.parameter),
            gradient.to(dtypes.gradient),
            {first.to(dtypes.parameter), second.to(dtypes.parameter), third.to(dtypes.parameter)}};
  }
};

/// Copies of buffers at `offset` bytes, one more for each tensor, between guard bytes.
class MisalignedBuffers {
 public:
  MisalignedBuffers(const StepBuffers& buffers, std::size_t offset)
      : count_(buffers.parameter.numel()) {
    for (const auto& tensor : buffers.tensors()) {
      GuardedMemory guarded{std::vector<char>(tensor.nbytes() + 2 * kMargin, kGuardByte), offset++,
                            tensor.nbytes()};
      std::memcpy(guarded.data(), tensor.const_data_ptr(), tensor.nbytes());
      memories_.push_back(std::move(guarded));
    }
  }

  mezzo::detail::ParamPointers pointers() {
    return {memories_[0].data(),
            memories_[1].data(),
            {memories_[2].data(), memories_[3].data(), memories_[4].data()},
            count_};
  }

  bool equals(const StepBuffers& expected) {
    const auto tensors = expected.tensors();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      GuardedMemory& guarded = memories_[i];
      if (std::memcmp(guarded.data(), tensors[i].const_data_ptr(), guarded.bytes) != 0)
        return false;
      std::memset(guarded.data(), kGuardByte, guarded.bytes);
      if (guarded.memory != std::vector<char>(guarded.memory.size(), kGuardByte)) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kMargin = 80;
  static constexpr char kGuardByte = 'm';
  struct GuardedMemory {
    std::vector<char> memory;
    std::size_t offset;
    std::size_t bytes;
    char* data() { return memory.data() + offset; }
  };
  std::vector<GuardedMemory> memories_;
  int64_t count_;
};
