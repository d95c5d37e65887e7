#include <torch/torch.h>
//
#include <mezzo/kernels/compress_tensors.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace compress_tensors_test {
namespace {

using mezzo::detail::AtenCompress;
using mezzo::detail::CpuIsa;
using mezzo::detail::ResidualFactors;

constexpr double kInf = std::numeric_limits<double>::infinity();

/// Values over half's range and beyond, zeros of both signs, infs and NaN; at odd places of memory
/// if `offset` is odd.
at::Tensor sample(int64_t count, at::ScalarType dtype, int64_t offset = 0) {
  at::Tensor values =
      at::randn({count + offset}, at::kDouble) * at::exp(at::randn({count + offset}) * 6);
  const std::vector<double> special = {0.,   -0.,  kInf,    -kInf,   std::nan(""), 65504., 65519.,
                                       6e-8, 3e-8, 65536e3, 3.39e38, 1e-40,        -1e-8};
  for (std::size_t i = 0; i < special.size() && static_cast<int64_t>(i * 3) < count; ++i) {
    values[static_cast<int64_t>(i * 3) + offset] = special[i];
  }
  return values.to(dtype).narrow(0, offset, count);
}

/// The same values bit for bit, any NaN for any other.
bool same(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor equal = at::logical_or(at::eq(a, b).logical_and(a.signbit() == b.signbit()),
                                          at::isnan(a).logical_and(at::isnan(b)));
  return equal.all().item<bool>();
}

struct Case {
  CpuIsa isa;
  at::ScalarType dtype, sent;
  int64_t count, offset;
};

std::vector<Case> compress_cases() {
  std::vector<Case> all;
  for (const auto isa : {CpuIsa::vector128, CpuIsa::avx2, CpuIsa::avx512}) {
    if (!mezzo::detail::has_isa(isa)) continue;
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      for (const auto sent : {at::kBFloat16, at::kHalf}) {
        all.push_back({isa, dtype, sent, 0, 0});
        all.push_back({isa, dtype, sent, 1, 0});
        all.push_back({isa, dtype, sent, 101, 1});
      }
    }
  }
  return all;
}

TEST(CompressLoops, RoundTheProductToNearestAsLibtorchDoes) {
  for (const Case& c : compress_cases()) {
    const at::Tensor from = sample(c.count, c.dtype, c.offset);
    const at::Tensor to = at::full({c.count + 1}, 7, c.sent);
    const auto loops = mezzo::detail::compress_loops(c.dtype, c.sent, c.isa);
    loops.narrow(from.const_data_ptr(), to.mutable_data_ptr(), c.count, 1. / 3);
    EXPECT_TRUE(same(to.narrow(0, 0, c.count), (from * (1. / 3)).to(at::kFloat).to(c.sent)))
        << static_cast<int>(c.isa) << c.dtype << c.sent;
    EXPECT_EQ(to[c.count].item<int>(), 7) << "wrote behind the end";
  }
}

TEST(CompressLoops, WidenWhatTheyNarrowedAndSeeEveryInfAndNaN) {
  for (const Case& c : compress_cases()) {
    const at::Tensor from = sample(c.count, c.sent, c.offset);
    const at::Tensor to = at::full({c.count + 1}, 7, c.dtype);
    const auto loops = mezzo::detail::compress_loops(c.dtype, c.sent, c.isa);
    const bool found = loops.widen(from.const_data_ptr(), to.mutable_data_ptr(), c.count, 3.);
    const at::Tensor wanted = from.to(c.dtype) * 3;
    EXPECT_TRUE(same(to.narrow(0, 0, c.count), wanted));
    EXPECT_EQ(found, !at::isfinite(wanted).all().item<bool>());
    EXPECT_EQ(to[c.count].item<int>(), 7);
    for (int64_t bad = 0; bad < c.count; bad += 13) {
      const at::Tensor one = at::ones({c.count}, c.sent);
      one[bad] = bad % 2 == 0 ? kInf : std::nan("");
      EXPECT_TRUE(loops.widen(one.const_data_ptr(), to.mutable_data_ptr(), c.count, 1.)) << bad;
    }
  }
}

TEST(CompressLoops, ResidualsAreWhatRoundingLost) {
  for (const Case& c : compress_cases()) {
    const at::Tensor from = sample(c.count, c.dtype, c.offset);
    const at::Tensor residual = at::randn({c.count}, c.dtype) * 1e-3;
    const at::Tensor before = residual.clone();
    const at::Tensor to = at::empty({c.count}, c.sent);
    const ResidualFactors factors{.value = 0.25, .scale = 8, .inv_scale = 0.125};
    mezzo::detail::compress_loops(c.dtype, c.sent, c.isa)
        .narrow_with_residual(from.const_data_ptr(), residual.mutable_data_ptr(),
                              to.mutable_data_ptr(), c.count, &factors);
    for (int64_t i = 0; i < c.count; ++i) {
      const at::Tensor value = from[i];
      if (value.item<double>() == 0.) {
        EXPECT_TRUE(same(to[i], value.to(c.sent)));
        EXPECT_TRUE(same(residual[i], before[i])) << "it waits";
        continue;
      }
      const at::Tensor wanted = value * 0.25 + before[i] * 8;  // both products are exact
      EXPECT_TRUE(same(to[i], wanted.to(at::kFloat).to(c.sent)));
      const double lost = (wanted.item<double>() - to[i].item<double>()) / 8;
      EXPECT_EQ(residual[i].item<double>(), std::isfinite(lost) ? lost : 0.) << i << ' ' << value;
    }
  }
}

TEST(CompressTensors, AtenGivesTheSameBitsAsTheKernels) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const auto sent : {at::kBFloat16, at::kHalf}) {
      const at::Tensor from = sample(1000, dtype);
      const at::Tensor residual = at::randn({1000}, dtype) * 1e-3;
      const at::Tensor other_residual = residual.clone();
      const at::Tensor to = at::empty({1000}, sent), other_to = at::empty({1000}, sent);

      mezzo::detail::narrow_into(to, from, 1. / 3);
      AtenCompress::narrow(other_to, from, 1. / 3);
      EXPECT_TRUE(same(to, other_to)) << dtype << sent;

      const mezzo::detail::CompressFactors factors{0.5, at::scalar_tensor(1024., dtype)};
      mezzo::detail::narrow_into(to, from, residual, factors);
      AtenCompress::narrow_with_residual(other_to, from, other_residual, factors);
      EXPECT_TRUE(same(to, other_to)) << dtype << sent;
      EXPECT_TRUE(same(residual, other_residual)) << dtype << sent;

      for (const at::Tensor& given : {to, at::ones({1000}, sent)}) {
        const at::Tensor wide = at::empty({1000}, dtype), other_wide = at::empty({1000}, dtype);
        const at::Tensor finite = mezzo::detail::widen_into(wide, given, 3.);
        EXPECT_TRUE(at::equal(finite, AtenCompress::widen(other_wide, given, 3.)));
        EXPECT_TRUE(same(wide, other_wide));
      }
    }
  }
}

TEST(CompressTensors, LargeBuffersAreSharedByThreadsAndWritesAreCounted) {
  const int64_t count = 3 * 32768 + 5;
  const at::Tensor from = at::randn({count}), back = at::empty({count});
  const at::Tensor to = at::zeros({count}, at::kBFloat16);
  const auto version = to._version(), back_version = back._version();
  mezzo::detail::narrow_into(to, from, 1.);
  EXPECT_TRUE(at::equal(to, from.to(at::kBFloat16)));
  EXPECT_TRUE(mezzo::detail::widen_into(back, to, 1.).item<bool>());
  EXPECT_TRUE(at::equal(back, to.to(at::kFloat)));
  EXPECT_GT(to._version(), version);
  EXPECT_GT(back._version(), back_version);
  to[count - 1] = kInf;
  EXPECT_FALSE(mezzo::detail::widen_into(back, to, 1.).item<bool>());
}

}  // namespace
}  // namespace compress_tensors_test
