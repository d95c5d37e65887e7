// LAMB's two loops against a plain reference, bit for bit: every pair of dtypes and every
// instruction set that this machine has, every tail, any alignment, values at the formats' edges,
// every way of keeping weights; and how a step cuts its parameters.

#include <mezzo/kernels/lamb_step_cpu.h>
#include <mezzo/kernels/optimizer_step_table.h>
#include <mezzo/kernels/weight_formats.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "step_buffers.h"

namespace {

using mezzo::detail::CpuIsa;
using mezzo::detail::kStepPiece;
using mezzo::detail::LambCoefficients;
using mezzo::detail::LambConstants;
using mezzo::detail::LambNorms;
using mezzo::detail::StepLoop;
using mezzo::detail::StepNumbers;
using mezzo::detail::StepSpan;
using mezzo::detail::StepTask;
using mezzo::detail::StepUse;
using mezzo::optim::WeightStorage;

constexpr DtypePair kBFloat16s{torch::kBFloat16, torch::kBFloat16};

LambCoefficients coefficients(double weight_decay = 0.1) {
  const LambConstants constants{
      .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-6, .weight_decay = weight_decay};
  return constants.at(/*lr=*/1e-2, /*step=*/3);
}

/// Both passes over a stretch that is all of its parameter.
LambNorms run(const StepLoop& loop, const DtypePair& dtypes, const StepSpan& span,
              LambCoefficients c, const StepUse& use, bool clears = false) {
  LambNorms norms;
  const StepTask task = task_of(loop, dtypes, span, c, use, clears);
  mezzo::detail::for_widened<kStepPiece>(task, 0, span.count, [&](const StepSpan& part) {
    loop.learn(part, task.coefficients, use, norms);
  });
  c.adapt(norms);
  loop.step(span, c, use);
  return norms;
}

void add_square(float value, double& sum) {
  sum += static_cast<double>(value) * static_cast<double>(value);
}
void add_square(double value, double& sum) { sum = std::fma(value, value, sum); }

/// The sixteen sums that the loops' comment promises, added as a tree.
template <class T>
double sum_of_squares(const std::vector<T>& values) {
  std::array<double, 16> sums{};
  for (std::size_t i = 0; i < values.size(); ++i) add_square(values[i], sums[i % 16]);
  for (std::size_t step = 8; step > 0; step /= 2) {
    for (std::size_t i = 0; i < step; ++i) sums[i] += sums[i + step];
  }
  return sums[0];
}

c10::BFloat16 rounded(float value, uint32_t noise) {
  uint32_t bits = 0;
  mezzo::detail::narrow_stochastically(value, noise, bits);
  return {static_cast<uint16_t>(bits), c10::BFloat16::from_bits()};
}

/// The random bits of an element's parameter and moments.
std::array<uint32_t, 3> noise_of(uint64_t number, const StepUse& use) {
  const auto key = mezzo::detail::random_key(use.seed, use.step, use.parameter, number >> 32);
  uint32_t first = static_cast<uint32_t>(number) ^ key.first;
  mezzo::detail::mix(first);
  uint32_t second = first + key.second;
  mezzo::detail::mix(second);
  return {first & 0xFFFFU, first >> 16, second & 0xFFFFU};
}

/// A value as memory holds it: stochastically where there is noise, to nearest elsewhere.
template <class T>
T stored(T value, torch::ScalarType dtype, const uint32_t* noise) {
  if (noise != nullptr) return static_cast<T>(rounded(static_cast<float>(value), *noise));
  if (dtype == torch::kBFloat16) return static_cast<T>(c10::BFloat16(static_cast<float>(value)));
  if (dtype == torch::kHalf) return static_cast<T>(c10::Half(static_cast<float>(value)));
  return value;
}

/// A step in plain code: T is float, or double for double. Each buffer is widened to T beforehand,
/// and holds after it what memory of `dtype` holds.
template <class T>
struct PlainLamb {
  LambCoefficients c;
  StepUse use;
  torch::ScalarType dtype;
  bool is_stochastic;
  uint64_t first;

  LambNorms step(std::vector<T>& p, const std::vector<T>& g, std::vector<T>& m,
                 std::vector<T>& v) const {
    const auto in = [](double value) { return static_cast<T>(value); };
    std::vector<T> update(p.size());
    for (std::size_t i = 0; i < p.size(); ++i) {
      const auto noise = noise_of(first + i, use);
      const T gradient = g[i] * in(use.factor);
      m[i] = std::fma(in(c.beta1), m[i], in(1.0 - c.beta1) * gradient);
      v[i] = std::fma(in(c.beta2), v[i], in(1.0 - c.beta2) * gradient * gradient);
      m[i] = stored(m[i], dtype, is_stochastic ? &noise[1] : nullptr);
      v[i] = stored(v[i], dtype, is_stochastic ? &noise[2] : nullptr);
      const T denominator = std::fma(std::sqrt(v[i]), in(c.root_scale), in(c.eps));
      update[i] = std::fma(in(c.weight_decay), p[i], m[i] * in(c.mean_scale) / denominator);
    }
    const LambNorms norms{sum_of_squares(p), sum_of_squares(update)};
    double ratio = 1;
    if (c.adapts && norms.parameter != 0 && norms.update != 0) {
      ratio = std::sqrt(norms.parameter) / std::sqrt(norms.update);
    }
    for (std::size_t i = 0; i < p.size(); ++i) {
      const auto noise = noise_of(first + i, use);
      p[i] = std::fma(in(-c.rate * ratio), update[i], p[i]);
      p[i] = stored(p[i], dtype, is_stochastic ? &noise[0] : nullptr);
    }
    return norms;
  }
};

template <class T>
std::vector<T> values_of(const torch::Tensor& tensor) {
  const auto wide = tensor.to(torch::CppTypeToScalarType<T>::value).contiguous();
  return {wide.template const_data_ptr<T>(), wide.template const_data_ptr<T>() + wide.numel()};
}

struct Expected {
  StepBuffers after;
  LambNorms norms;
};

template <class T>
Expected expected_in(const StepBuffers& before, const LambCoefficients& c, const StepUse& use,
                     bool is_stochastic, uint64_t first) {
  const auto dtype = before.parameter.scalar_type();
  auto p = values_of<T>(before.parameter);
  auto m = values_of<T>(before.moments[0]);
  auto v = values_of<T>(before.moments[1]);
  const PlainLamb<T> plain{c, use, dtype, is_stochastic, first};
  const LambNorms norms = plain.step(p, values_of<T>(before.gradient), m, v);
  StepBuffers after = before.clone();
  const auto tensor_of = [&](const std::vector<T>& values) {
    return torch::tensor(at::ArrayRef<T>(values), torch::CppTypeToScalarType<T>::value).to(dtype);
  };
  after.parameter = tensor_of(p);
  after.moments[0] = tensor_of(m);
  after.moments[1] = tensor_of(v);
  return {after, norms};
}

Expected expected(const StepBuffers& before, const LambCoefficients& c, const StepUse& use,
                  bool is_stochastic = false, uint64_t first = 0) {
  return before.parameter.scalar_type() == torch::kDouble
             ? expected_in<double>(before, c, use, is_stochastic, first)
             : expected_in<float>(before, c, use, is_stochastic, first);
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}
bool same(const LambNorms& a, const LambNorms& b) {
  return same(a.parameter, b.parameter) && same(a.update, b.update);
}

class LambLoops : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
    torch::manual_seed(1);
  }

  static StepLoop loop(const DtypePair& dtypes, WeightStorage storage = WeightStorage::plain) {
    return mezzo::detail::lamb_loop(storage, dtypes.parameter, GetParam());
  }
};

TEST_P(LambLoops, GiveThePlainReferencesBitsForEveryTail) {
  for (const DtypePair& dtypes : kDtypePairs) {
    for (int64_t count = 0; count <= 67; ++count) {
      const StepUse use{.factor = 0.3};
      auto buffers = StepBuffers::random(dtypes, count);
      auto [after, norms] = expected(buffers, coefficients(), use);
      const bool clears = count % 2 == 0;
      if (clears) after.gradient.zero_();
      EXPECT_TRUE(
          same(run(loop(dtypes), dtypes, buffers.span(), coefficients(), use, clears), norms))
          << name_of(dtypes) << " " << count;
      EXPECT_TRUE(same_bits(buffers, after)) << name_of(dtypes) << " " << count;
    }
  }
}

// Without weight decay the ratio is 1: with NaN among the values it would make all of them NaN.
TEST_P(LambLoops, GiveThePlainReferencesBitsAtTheFormatsEdges) {
  for (const DtypePair& dtypes : kDtypePairs) {
    const StepUse use{.factor = std::ldexp(1.0, -16)};
    auto buffers = StepBuffers::edges(dtypes);
    const auto [after, norms] = expected(buffers, coefficients(0), use);
    EXPECT_TRUE(same(run(loop(dtypes), dtypes, buffers.span(), coefficients(0), use), norms));
    EXPECT_TRUE(same_bits(buffers, after)) << name_of(dtypes);
    EXPECT_FALSE(buffers.parameter.isnan().all().item<bool>());
  }
}

TEST_P(LambLoops, TakeMemoryAtAnyByteAndTouchNothingElse) {
  for (const DtypePair& dtypes : kDtypePairs) {
    const auto before = StepBuffers::random(dtypes, 35);
    const auto [after, norms] = expected(before, coefficients(), {});
    for (std::size_t offset = 0; offset < 33; ++offset) {
      MisalignedBuffers memory(before, offset);
      EXPECT_TRUE(same(run(loop(dtypes), dtypes, memory.span(), coefficients(), {}), norms));
      EXPECT_TRUE(memory.holds(after)) << name_of(dtypes) << " " << offset;
    }
  }
}

TEST_P(LambLoops, RoundStochasticallyByTheElementsNumber) {
  for (const uint64_t first :
       {uint64_t{0}, uint64_t{kStepPiece}, (uint64_t{3} << 32) - kStepPiece, uint64_t{3} << 32}) {
    for (const int64_t count : {0, 1, 15, 16, 17, 100, 1000}) {
      const StepUse use{.factor = 0.25, .seed = 11, .step = 7, .parameter = 3};
      auto buffers = StepBuffers::random(kBFloat16s, count);
      const auto [after, norms] =
          expected(buffers, coefficients(), use, /*is_stochastic=*/true, first);
      auto span = buffers.span();
      span.first = static_cast<int64_t>(first);
      const auto both = loop(kBFloat16s, WeightStorage::stochastic);
      EXPECT_TRUE(same(run(both, kBFloat16s, span, coefficients(), use), norms));
      EXPECT_TRUE(same_bits(buffers, after)) << count << " elements from " << first;
    }
  }
}

TEST_P(LambLoops, OnSplitWeightsGiveWhatFloatsGive) {
  for (const int64_t count : {0, 1, 15, 16, 17, 100, 1000}) {
    auto floats = StepBuffers::random({torch::kFloat, torch::kBFloat16}, count);
    auto split = floats.clone();
    const auto lower = floats.parameter.view(torch::kInt).to(torch::kShort);
    const auto upper = floats.parameter.view(torch::kInt).add(0x8000).bitwise_right_shift(16);
    split.parameter = upper.to(torch::kShort).view(torch::kBFloat16);
    auto span = split.span();
    span.low_half_or_copy = lower.data_ptr();
    StepTask task = task_of(loop(kBFloat16s, WeightStorage::split_master), kBFloat16s, span,
                            coefficients(), {});
    task.sizes.moment = sizeof(float);
    LambNorms norms;
    mezzo::detail::for_widened<kStepPiece>(task, 0, count, [&](const StepSpan& part) {
      task.loop.learn(part, task.coefficients, task.use, norms);
    });
    auto adapted = coefficients();
    adapted.adapt(norms);
    task.loop.step(span, adapted, task.use);
    const DtypePair dtypes{torch::kFloat, torch::kBFloat16};
    EXPECT_TRUE(same(run(loop(dtypes), dtypes, floats.span(), coefficients(), {}), norms));
    const auto whole = split.parameter.view(torch::kShort).to(torch::kInt).bitwise_left_shift(16) +
                       lower.to(torch::kInt);
    EXPECT_TRUE(torch::equal(whole, floats.parameter.view(torch::kInt)));
    EXPECT_TRUE(torch::equal(split.moments[0], floats.moments[0]));
    EXPECT_TRUE(torch::equal(split.moments[1], floats.moments[1]));
  }
}

TEST_P(LambLoops, WriteTheCopyWithTheParameter) {
  const DtypePair dtypes{torch::kFloat, torch::kFloat};
  for (const auto copy_dtype : {torch::kBFloat16, torch::kHalf}) {
    auto buffers = StepBuffers::random(dtypes, 53);
    const auto copy = torch::zeros({53}, copy_dtype);
    auto span = buffers.span();
    span.low_half_or_copy = copy.data_ptr();
    run(loop(dtypes), dtypes, span, coefficients(), {.copies_half = copy_dtype == torch::kHalf});
    EXPECT_TRUE(torch::equal(copy, buffers.parameter.to(copy_dtype)));
  }
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, LambLoops,
                         testing::Values(CpuIsa::vector128, CpuIsa::avx2, CpuIsa::avx512),
                         [](const auto& test) { return name_of(test.param); });

TEST(LambLoopDtypes, AreThoseOfTheOtherOptimizers) {
  const auto has_loop = [](WeightStorage storage, torch::ScalarType kept) {
    return static_cast<bool>(mezzo::detail::lamb_loop(storage, kept, CpuIsa::vector128));
  };
  EXPECT_TRUE(has_loop(WeightStorage::master, torch::kFloat));
  EXPECT_FALSE(has_loop(WeightStorage::plain, torch::kLong));
}

TEST(LambNorms, GiveARatioOfOneWhereEitherIsZeroAndNaNWhereEitherIs) {
  EXPECT_EQ((LambNorms{16, 4}.trust_ratio()), 2);
  EXPECT_EQ((LambNorms{0, 4}.trust_ratio()), 1);
  EXPECT_EQ((LambNorms{16, 0}.trust_ratio()), 1);
  EXPECT_TRUE(std::isnan(LambNorms{NAN, 4}.trust_ratio()));
  EXPECT_TRUE(std::isnan(LambNorms{16, NAN}.trust_ratio()));
}

/// A task that counts visits of its elements in its memory: by 1 in the first pass, 16 in the
/// second, where it also notes the rate.
StepTask counting_task(std::vector<uint8_t>& memory, double weight_decay) {
  const auto learn = [](const StepSpan& span, const StepNumbers&, const StepUse&,
                        LambNorms& norms) {
    auto* visits = static_cast<uint8_t*>(span.parameter);
    for (int64_t i = 0; i < span.count; ++i) ++visits[i];
    EXPECT_EQ(span.first % kStepPiece, 0) << "pieces begin where nothing else decides";
    norms = {static_cast<double>(span.count) * 4, static_cast<double>(span.count)};
  };
  const auto move = [](const StepSpan& span, const StepNumbers& numbers, const StepUse&) {
    const auto c = numbers.as<LambCoefficients>();
    auto* visits = static_cast<uint8_t*>(span.parameter);
    for (int64_t i = 0; i < span.count; ++i) visits[i] = static_cast<uint8_t>(visits[i] + 16);
    EXPECT_EQ(c.rate, c.adapts ? 2 * 1e-2 : 1e-2);
  };
  return {StepLoop{move, learn},
          {memory.data(), nullptr, {}, static_cast<int64_t>(memory.size())},
          {.parameter = 1, .gradient = 1, .moment = 1},
          torch::kFloat,
          /*widens=*/false,
          /*clears=*/false,
          coefficients(weight_decay),
          {}};
}

TEST(LambPieces, CoverEveryElementOfEveryTaskOnceInEachPassWithTheWholeParametersRatio) {
  std::vector<std::vector<uint8_t>> memory;
  for (const int64_t count : {int64_t{3}, int64_t{0}, kStepPiece - 4, kStepPiece + 1, int64_t{1},
                              3 * kStepPiece, int64_t{7}, kStepPiece - 1, kStepPiece}) {
    memory.emplace_back(static_cast<std::size_t>(count));
  }
  for (int i = 0; i < 300; ++i) memory.emplace_back(std::size_t{100});
  std::vector<StepTask> tasks;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    tasks.push_back(counting_task(memory[i], i % 4 == 3 ? 0 : 0.1));
  }
  mezzo::detail::run_lamb_cpu(tasks);
  for (const auto& bytes : memory) EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), 17));
  mezzo::detail::run_lamb_cpu({});
}

TEST(LambTable, KnowsTheBlocksOfEachRow) {
  using Table = mezzo::detail::DeviceStepTable<LambConstants>;
  Table table(/*elements_per_block=*/16);
  for (const int64_t count : {40, 0, 1, 16, 17, 100}) {
    mezzo::detail::StepRow row{};
    row.span.count = count;
    ASSERT_TRUE(table.push_back(row, {}));
  }
  ASSERT_EQ(table.rows(), 6);
  int64_t end = 0;
  for (int row = 0; row < table.rows(); ++row) {
    EXPECT_EQ(table.first_block(row), end);
    end = table.end_block(row);
    for (int64_t block = table.first_block(row); block < end; ++block) {
      EXPECT_EQ(table.slice_of(block).row, row);
    }
  }
  EXPECT_EQ(end, table.blocks());
}

}  // namespace
