// Vector arithmetic: every instruction set is bitwise identical to std::fma and std::sqrt.

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/kernels/cpu_isa.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__GNUC__) && defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

using mezzo::detail::CpuIsa;
using mezzo::detail::is_nan;

/// c = a * b + c; `count` is a multiple of every vector width.
template <class Element, class Vec>
struct FmaKernel {
  C10_ALWAYS_INLINE static void run(const Element* a, const Element* b, Element* c, int64_t count) {
    using Stored = typename Vec::Stored;
    for (int64_t i = 0; i < count; i += Vec::kWidth) {
      typename Vec::Bits bits;
      typename Vec::Value left;
      typename Vec::Value right;
      typename Vec::Value sum;
      Vec::load(reinterpret_cast<const Stored*>(a + i), bits);
      Vec::Format::to_opmath(bits, left);
      Vec::load(reinterpret_cast<const Stored*>(b + i), bits);
      Vec::Format::to_opmath(bits, right);
      Vec::load(reinterpret_cast<const Stored*>(c + i), bits);
      Vec::Format::to_opmath(bits, sum);
      Vec::fma(left, right, sum, sum);
      Vec::Format::from_opmath(sum, bits);
      Vec::store(bits, reinterpret_cast<Stored*>(c + i));
    }
  }
};

template <class Element, class Vec>
struct SqrtKernel {
  C10_ALWAYS_INLINE static void run(Element* x, int64_t count) {
    using Stored = typename Vec::Stored;
    for (int64_t i = 0; i < count; i += Vec::kWidth) {
      typename Vec::Bits bits;
      typename Vec::Value value;
      Vec::load(reinterpret_cast<const Stored*>(x + i), bits);
      Vec::Format::to_opmath(bits, value);
      Vec::sqrt(value, value);
      Vec::Format::from_opmath(value, bits);
      Vec::store(bits, reinterpret_cast<Stored*>(x + i));
    }
  }
};

template <class T>
bool same(T left, T right) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  return std::bit_cast<Bits>(left) == std::bit_cast<Bits>(right) || (is_nan(left) && is_nan(right));
}

/// Operands for which a second rounding changes the result: cancellation, ties, subnormals,
/// overflow, inf, NaN.
template <class T>
class Operands {
 public:
  std::vector<T> a, b, c;

  explicit Operands(std::size_t count) {
    std::mt19937_64 random(7);
    const auto any_bits = [&] {
      using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
      return std::bit_cast<T>(static_cast<Bits>(random()));
    };
    std::uniform_int_distribution<int> near(-60, 60);
    for (std::size_t i = 0; i < count; ++i) {
      const T left = any_bits();
      const T right = any_bits();
      a.push_back(left);
      b.push_back(right);
      switch (i % 4) {
        case 0:
          c.push_back(any_bits());
          break;
        case 1:
          c.push_back(-left * right);
          break;
        case 2:  // the addend's last bit near the product's
          c.push_back(std::ldexp(left * right, near(random)));
          break;
        default: {  // halfway between two values, but for a tail that a wider sum drops
          const T step = std::numeric_limits<T>::epsilon() * static_cast<T>(1 + random() % 500);
          a.back() = T{1} + step;
          b.back() = T{1} - step;
          const T ulp_is_two = std::ldexp(T{1}, std::numeric_limits<T>::digits);
          const T addend = ulp_is_two + static_cast<T>(random() % 2 * 2);
          c.push_back(random() % 2 == 0 ? addend : -addend);
        }
      }
    }
    const T infinity = std::numeric_limits<T>::infinity();
    const T tiny = std::numeric_limits<T>::denorm_min();
    const T largest = std::numeric_limits<T>::max();
    const std::vector<T> edges{0,
                               -T{0},
                               1,
                               -1,
                               tiny,
                               -tiny,
                               largest,
                               -largest,
                               infinity,
                               -infinity,
                               std::numeric_limits<T>::quiet_NaN(),
                               std::numeric_limits<T>::min()};
    for (const T x : edges) {
      for (const T y : edges) {
        for (const T z : edges) {
          a.push_back(x);
          b.push_back(y);
          c.push_back(z);
        }
      }
    }
    for (auto* values : {&a, &b, &c}) values->resize(values->size() / 16 * 16);
  }
};

class Simd : public testing::TestWithParam<CpuIsa> {
 protected:
  void SetUp() override {
    if (!mezzo::detail::has_isa(GetParam())) GTEST_SKIP() << "not on this CPU";
  }

  template <class T>
  static void expect_fma_of_one_rounding() {
    const Operands<T> operands(200000);
    auto results = operands.c;
    mezzo::detail::kernel_for_isa<FmaKernel, T>(GetParam())(
        operands.a.data(), operands.b.data(), results.data(), static_cast<int64_t>(results.size()));
    for (std::size_t i = 0; i < results.size(); ++i) {
      const T expected = std::fma(operands.a[i], operands.b[i], operands.c[i]);
      ASSERT_TRUE(same(results[i], expected))
          << std::hexfloat << operands.a[i] << " * " << operands.b[i] << " + " << operands.c[i]
          << " gave " << results[i] << " for " << expected;
    }
  }

  template <class T>
  static void expect_rounded_roots() {
    const Operands<T> operands(4000);
    auto results = operands.a;
    mezzo::detail::kernel_for_isa<SqrtKernel, T>(GetParam())(results.data(),
                                                             static_cast<int64_t>(results.size()));
    for (std::size_t i = 0; i < results.size(); ++i) {
      ASSERT_TRUE(same(results[i], std::sqrt(operands.a[i]))) << std::hexfloat << operands.a[i];
    }
  }
};

TEST_P(Simd, FloatFmaRoundsOnce) { expect_fma_of_one_rounding<float>(); }

TEST_P(Simd, DoubleFmaRoundsOnce) { expect_fma_of_one_rounding<double>(); }

TEST_P(Simd, SqrtIsCorrectlyRounded) {
  expect_rounded_roots<float>();
  expect_rounded_roots<double>();
}

#if defined(__GNUC__) && defined(__x86_64__)

/// Returns the processor state components in use (bit 2: upper halves of ymm), if CPUID reports
/// them.
std::optional<uint64_t> state_in_use() {
  unsigned features = 0, unused[3];
  if (__get_cpuid_count(0xD, 1, &features, &unused[0], &unused[1], &unused[2]) == 0) return {};
  if ((features & 4U) == 0) return {};
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return low | uint64_t{high} << 32;
}

// Dirty upper halves slow the caller's SSE code on Intel CPUs. This file is compiled at -O0, where
// g++ inserts no vzeroupper itself.
TEST_P(Simd, ExecutesVzeroupper) {
  std::vector<float> values(64, 4.0F);
  const auto root = mezzo::detail::kernel_for_isa<SqrtKernel, float>(GetParam());
  root(values.data(), 64);
  const std::optional<uint64_t> in_use = state_in_use();
  if (!in_use || GetParam() == CpuIsa::scalar) GTEST_SKIP() << "not known, or no vectors";
  EXPECT_EQ(*in_use & 4U, 0U);
}

#endif

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, Simd,
                         testing::Values(CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2,
                                         CpuIsa::avx512));

#if defined(__GNUC__) && defined(__x86_64__)

TEST(CpuIsaDeathTest, FollowsAtenCpuCapability) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // ATen reads the variable once a process
  for (const auto& [name, isa] : {std::pair{"default", CpuIsa::scalar}, {"avx2", CpuIsa::avx2}}) {
    setenv("ATEN_CPU_CAPABILITY", name, 1);
    EXPECT_EXIT(std::exit(static_cast<int>(mezzo::detail::best_isa())),
                testing::ExitedWithCode(static_cast<int>(isa)), "")
        << name;
  }
  unsetenv("ATEN_CPU_CAPABILITY");
}

#endif

}  // namespace
