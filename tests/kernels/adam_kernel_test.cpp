// The loop of Adam and AdamW against a plain reference, bit for bit: every pair of dtypes and every
// instruction set that this machine has, every tail, any alignment, values at the formats' edges.

#include <mezzo/kernels/adam_element.h>
#include <mezzo/kernels/optimizer_step_cpu.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "step_buffers.h"

namespace {

using mezzo::detail::AdamCoefficients;
using mezzo::detail::AdamConstants;
using mezzo::detail::AdamRule;
using mezzo::detail::CpuIsa;
using test_support::SameBits;

/// One element, as the papers and torch::optim have it; T is float, or double for double.
template <class T>
struct PlainAdam {
  AdamCoefficients c;
  bool amsgrad;

  void operator()(T& parameter, T gradient, T& mean, T& square, T& largest) const {
    const auto in = [](double value) { return static_cast<T>(value); };
    if (c.l2 != 0) gradient = std::fma(in(c.l2), parameter, gradient);
    mean = std::fma(in(c.beta1), mean, in(1.0 - c.beta1) * gradient);
    square = std::fma(in(c.beta2), square, in(1.0 - c.beta2) * gradient * gradient);
    T divisor = square;
    if (amsgrad) divisor = largest = largest > square ? largest : square;
    const T denominator = std::fma(std::sqrt(divisor), in(c.root_scale), in(c.eps));
    parameter = std::fma(in(-c.step_size), mean / denominator, parameter * in(c.decay));
  }
};

/// A loop and the plain reference for it.
struct AdamCase {
  DtypePair dtypes;
  CpuIsa isa;
  bool amsgrad;
  bool l2;

  std::string name() const {
    return name_of(dtypes) + (amsgrad ? " amsgrad" : "") + (l2 ? " l2" : "");
  }

  AdamCoefficients coefficients() const {
    const AdamConstants constants{
        .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .is_decoupled = !l2};
    return constants.at(/*lr=*/1e-3, /*step=*/3);
  }

  void run(const mezzo::detail::StepSpan& span, double factor, bool clears = false) const {
    using mezzo::detail::step_loop;
    constexpr auto kPlain = mezzo::optim::WeightStorage::plain;
    const auto loop = amsgrad ? step_loop<AdamRule<true>>(kPlain, dtypes.parameter, isa)
                              : step_loop<AdamRule<false>>(kPlain, dtypes.parameter, isa);
    mezzo::detail::run_step_cpu(
        {task_of(loop, dtypes, span, coefficients(), {.factor = factor}, clears)});
  }

  /// The buffers after one step of the plain reference with gradients times `factor`.
  StepBuffers expected(const StepBuffers& before, double factor) const {
    const bool is_double = dtypes.parameter == torch::kDouble;
    std::vector<torch::Tensor> values;
    for (const auto& tensor : before.in_order()) {
      values.push_back(tensor.to(is_double ? torch::kDouble : torch::kFloat, false, /*copy=*/true));
    }
    const auto step_all = [&]<class T>(T) {
      const PlainAdam<T> adam{coefficients(), amsgrad};
      for (int64_t i = 0; i < before.parameter.numel(); ++i) {
        const auto at = [&](std::size_t which) -> T& { return values[which].data_ptr<T>()[i]; };
        adam(at(0), at(1) * static_cast<T>(factor), at(2), at(3), at(4));
      }
    };
    is_double ? step_all(double{}) : step_all(float{});
    StepBuffers after = before.clone();
    after.parameter = values[0].to(dtypes.parameter);
    for (std::size_t k = 0; k < 3; ++k) after.moments[k] = values[2 + k].to(dtypes.parameter);
    return after;
  }
};

class AdamLoop : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
    torch::manual_seed(1);
  }

  static std::vector<AdamCase> cases() {
    std::vector<AdamCase> all;
    for (const auto& dtypes : kDtypePairs) {
      for (const bool amsgrad : {false, true}) {
        for (const bool l2 : {false, true}) all.push_back({dtypes, GetParam(), amsgrad, l2});
      }
    }
    return all;
  }
};

TEST_P(AdamLoop, GivesThePlainReferencesBitsForEveryTail) {
  for (const AdamCase& adam : cases()) {
    for (int64_t count = 0; count <= 67; ++count) {
      auto buffers = StepBuffers::random(adam.dtypes, count);
      const auto after = adam.expected(buffers, 0.3);
      adam.run(buffers.span(), 0.3);
      EXPECT_THAT(buffers.in_order(), SameBits(after.in_order())) << adam.name() << " " << count;
    }
  }
}

TEST_P(AdamLoop, GivesThePlainReferencesBitsAtTheFormatsEdges) {
  for (const AdamCase& adam : cases()) {
    auto buffers = StepBuffers::edges(adam.dtypes);
    const double factor = std::ldexp(1.0, -16);
    const auto after = adam.expected(buffers, factor);
    adam.run(buffers.span(), factor);
    EXPECT_THAT(buffers.in_order(), SameBits(after.in_order())) << adam.name();
  }
}

TEST_P(AdamLoop, TakesMemoryAtAnyByteAndTouchesNothingElse) {
  for (const AdamCase& adam : cases()) {
    const auto before = StepBuffers::random(adam.dtypes, 35);
    const auto after = adam.expected(before, 1.0);
    for (std::size_t offset = 0; offset < 33; ++offset) {
      MisalignedBuffers memory(before, offset);
      adam.run(memory.span(), 1.0);
      EXPECT_TRUE(memory.holds(after)) << adam.name() << " " << offset;
    }
  }
}

TEST_P(AdamLoop, ClearsTheGradientsWhenAsked) {
  for (const AdamCase& adam : cases()) {
    auto buffers = StepBuffers::random(adam.dtypes, 45);
    auto after = adam.expected(buffers, 0.5);
    adam.run(buffers.span(), 0.5, /*clears=*/true);
    after.gradient.zero_();
    EXPECT_THAT(buffers.in_order(), SameBits(after.in_order())) << adam.name();
  }
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, AdamLoop,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512),
                         [](const auto& test) { return name_of(test.param); });

TEST(AdamLoopDtypes, HasNoLoopForOtherDtypes) {
  using mezzo::detail::step_loop;
  constexpr auto kPlain = mezzo::optim::WeightStorage::plain;
  EXPECT_TRUE(step_loop<AdamRule<false>>(kPlain, torch::kHalf, mezzo::detail::best_isa()));
  EXPECT_FALSE(step_loop<AdamRule<false>>(kPlain, torch::kLong, mezzo::detail::best_isa()));
}

TEST(StepPieces, CoverEveryElementOfEveryTaskOnce) {
  constexpr int64_t kPiece = mezzo::detail::kStepPiece;
  using Task = mezzo::detail::StepTask;
  std::vector<std::vector<char>> memory;
  for (const int64_t count : {int64_t{3}, int64_t{0}, kPiece - 4, kPiece + 1, int64_t{1},
                              3 * kPiece, int64_t{7}, kPiece - 1, kPiece}) {
    memory.emplace_back(static_cast<std::size_t>(count));
  }
  std::vector<Task> tasks;
  for (auto& bytes : memory) {
    const auto visit = [](const mezzo::detail::StepSpan& span, const auto&, const auto&) {
      auto* visits = static_cast<char*>(span.parameter);
      for (int64_t i = 0; i < span.count; ++i) ++visits[i];
    };
    tasks.push_back({{visit},
                     {bytes.data(), nullptr, {}, static_cast<int64_t>(bytes.size())},
                     {.parameter = 1, .gradient = 1, .moment = 1},
                     torch::kFloat,
                     /*widens=*/false,
                     /*clears=*/false,
                     {},
                     {}});
  }
  mezzo::detail::run_step_cpu(tasks);
  for (const auto& bytes : memory) EXPECT_EQ(bytes, std::vector<char>(bytes.size(), 1));
}

}  // namespace
