// The grids of Apex's tests of its fused kernels (multi_tensor_scale, _axpby's overflow checks,
// _l2norm, _unscale_l2norm, scale_check_overflow, update_scale_hysteresis), with their sizes and
// numbers, for what mezzo has in those places.

#include <mezzo/base/loss_scale.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/kernels/update_scale.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../support/special_values.h"

namespace {

using mezzo::LossScale;
using mezzo::Verdict;
using mezzo::detail::summarize_gradients;
using mezzo::detail::unscale_and_check_;

/// Apex cuts tensors into chunks of a size that its test varies; mezzo on the CPU into as many
/// stretches as there are threads.
class Threads {
 public:
  explicit Threads(int number) : before_(at::get_num_threads()) { at::set_num_threads(number); }
  ~Threads() { at::set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

struct Sizes {
  int64_t first;
  int64_t second;
};

/// Tensors of two sizes in turn, `repeat` times; all of them `value`. The largest grid point has 50
/// million elements, which is why its tests take seconds: there they stay with Apex's own dtypes
/// and one number of threads.
class Grid : public testing::TestWithParam<std::tuple<torch::DeviceType, Sizes>> {
 protected:
  void SetUp() override {
    if (device() == torch::kCUDA && !torch::cuda::is_available()) {
      GTEST_SKIP() << "libtorch sees no CUDA device here";
    }
  }

  static torch::DeviceType device() { return std::get<0>(GetParam()); }
  static Sizes sizes() { return std::get<1>(GetParam()); }

  static std::vector<torch::Tensor> tensors(int64_t repeat, torch::ScalarType dtype, float value) {
    std::vector<torch::Tensor> all;
    const auto options = torch::dtype(dtype).device(device());
    for (int64_t i = 0; i < repeat; ++i) {
      all.push_back(torch::full({sizes().first}, value, options));
      all.push_back(torch::full({sizes().second}, value, options));
    }
    return all;
  }

  static torch::Tensor on_device(float value) { return torch::full({}, value, device()); }

  static bool unscale(const std::vector<torch::Tensor>& gradients, float inv_scale) {
    auto found_inf = on_device(0);
    unscale_and_check_(gradients, found_inf, on_device(inv_scale));
    return found_inf.item<float>() != 0;
  }

  static bool is_huge(int64_t repeat) { return sizes().first > 100000 && repeat > 1; }

  static std::vector<int> thread_counts(int64_t repeat) {
    return device() == torch::kCPU && !is_huge(repeat) ? std::vector<int>{1, 2, 3}
                                                       : std::vector<int>{2};
  }
};

bool all_are(const std::vector<torch::Tensor>& tensors, float value) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const torch::Tensor& tensor) {
    return tensor.eq(value).all().item<bool>();
  });
}

/// Puts `value` where Apex's test does, and back.
template <class Find>
bool finds(const std::vector<torch::Tensor>& tensors, int64_t tensor, int64_t place, float value,
           const Find& find) {
  const auto element = tensors[static_cast<std::size_t>(tensor)][place];
  const auto before = element.clone();
  element.fill_(value);
  const bool found = find();
  element.copy_(before);
  return found;
}

TEST_P(Grid, UnscalesAllAndFindsABadElementAtApexsPlaces) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    for (const int64_t repeat : {1, 55}) {
      if (is_huge(repeat) && dtype == torch::kBFloat16) continue;
      auto all = tensors(repeat, dtype, 4.0F);
      for (const int threads : thread_counts(repeat)) {
        const Threads guard(threads);
        for (auto& tensor : all) tensor.fill_(4.0);
        ASSERT_FALSE(unscale(all, 1.0F / 4.0F));
        ASSERT_TRUE(all_are(all, 1.0F)) << dtype << ' ' << repeat;
        const auto find = [&] { return unscale(all, 1.0F); };  // which writes nothing
        EXPECT_FALSE(find());
        EXPECT_TRUE(finds(all, 0, 0, kNan, find));
        EXPECT_TRUE(finds(all, 2 * repeat - 1, sizes().second - 1, kInfinity, find));
        EXPECT_TRUE(finds(all, 2 * (repeat / 2), sizes().first / 2, kInfinity, find));
      }
      const auto multiply = [&] { return unscale(all, 0.5F); };
      EXPECT_TRUE(finds(all, 0, 0, kNan, multiply));
      EXPECT_TRUE(finds(all, 2 * repeat - 1, sizes().second - 1, kInfinity, multiply));
    }
  }
}

TEST_P(Grid, HasTheNormOfTheUnscaledWhole) {
  const auto n = static_cast<double>(sizes().first + sizes().second);
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    for (const int64_t repeat : {1, 55}) {
      if (is_huge(repeat) && dtype == torch::kBFloat16) continue;
      const auto all = tensors(repeat, dtype, 4.0F);
      for (const int threads : thread_counts(repeat)) {
        const Threads guard(threads);
        for (const float inv_scale : {1.0F, 0.5F}) {
          const Verdict summary = summarize_gradients(all, on_device(inv_scale));
          const double expected = 4.0 * inv_scale * std::sqrt(n * static_cast<double>(repeat));
          EXPECT_NEAR(std::sqrt(summary.sum_of_squares.item<double>()), expected, 1e-9 * expected);
          EXPECT_EQ(summary.max_abs.item<double>(), 4.0 * inv_scale);
          EXPECT_EQ(summary.found_inf.item<float>(), 0.0F);
        }
      }
    }
  }
}

TEST_P(Grid, HasTheNormOfEachTensorAsASummaryOfOne) {
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    for (const auto& tensor : tensors(1, dtype, 4.0F)) {
      const Verdict summary = summarize_gradients({tensor}, on_device(0.5F));
      EXPECT_EQ(summary.sum_of_squares.item<double>(), 4.0 * static_cast<double>(tensor.numel()));
    }
  }
}

constexpr Sizes kSizes[] = {{7777 * 77, 555 * 555}, {777, 555},       {555, 2048 * 32 + 1},
                            {2048 * 32 + 1, 555},   {555, 2048 * 32}, {2048 * 32, 555},
                            {33333, 555},           {555, 33333}};

std::string name_of(const testing::TestParamInfo<Grid::ParamType>& point) {
  const auto [device, sizes] = point.param;
  return std::string(device == torch::kCPU ? "Cpu" : "Cuda") + std::to_string(sizes.first) + "And" +
         std::to_string(sizes.second);
}

INSTANTIATE_TEST_SUITE_P(ApexsSizes, Grid,
                         testing::Combine(testing::Values(torch::kCPU, torch::kCUDA),
                                          testing::ValuesIn(kSizes)),
                         name_of);

/// test_scale.py: one matrix of 888 by 999, of ones times 128.
TEST(ApexScale, DownscalesAMatrixAndFindsBadElementsInIt) {
  const auto found = [](torch::Tensor matrix) {
    auto found_inf = torch::zeros({});
    unscale_and_check_({matrix}, found_inf, torch::full({}, 1.0F / 128.0F));
    return found_inf.item<float>() != 0;
  };
  for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    const auto matrix = torch::full({888, 999}, 128.0, dtype);
    EXPECT_FALSE(found(matrix));
    EXPECT_TRUE(all_are({matrix}, 1.0F));
    for (const auto& [y, x] : {std::pair{0, 0}, {888 / 2, 999 / 2}, {888 - 1, 999 - 1}}) {
      for (const float bad : {kInfinity, kNan}) {
        const auto broken = torch::ones({888, 999}, dtype);
        broken[y][x] = bad;
        EXPECT_TRUE(found(broken)) << y << ' ' << x;
      }
    }
  }
}

/// test_multi_tensor_axpby.py's channels-last shapes: memory in another order is walked as well.
TEST(ApexChannelsLast, GradientsAreUnscaledAndMeasured) {
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> shapes{
      {{7, 77, 7, 77}, {5, 55, 5, 55}},           {{1, 1, 777, 1}, {1, 1, 555, 1}},
      {{5, 47, 5, 55}, {1, 1, 1, 2048 * 32 + 1}}, {{1, 1, 1, 2048 * 32 + 1}, {55, 47, 5, 55}},
      {{555, 1, 1, 1}, {32, 8, 32, 8}},           {{32, 8, 32, 8}, {55, 47, 5, 55}},
      {{1, 1, 33333, 1}, {55, 47, 55, 5}},        {{55, 47, 55, 5}, {1, 1, 33333, 1}}};
  for (const auto& [first, second] : shapes) {
    for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
      std::vector<torch::Tensor> all;
      double count = 0;
      for (const auto& shape : {first, second}) {
        all.push_back(
            torch::full(shape, 16.0, dtype).contiguous(torch::MemoryFormat::ChannelsLast));
        count += static_cast<double>(all.back().numel());
      }
      const auto summary = summarize_gradients(all, torch::full({}, 0.25F));
      EXPECT_EQ(summary.sum_of_squares.item<double>(), 16.0 * count);
      auto found_inf = torch::zeros({});
      unscale_and_check_(all, found_inf, torch::full({}, 0.25F));
      EXPECT_EQ(found_inf.item<float>(), 0.0F);
      EXPECT_TRUE(all_are(all, 4.0F));
      EXPECT_TRUE(all[0].is_contiguous(torch::MemoryFormat::ChannelsLast));
    }
  }
}

/// update_scale_hysteresis, by the rule on the host and by the kernel on a tensor.
class Hysteresis {
 public:
  explicit Hysteresis(const LossScale& rule)
      : rule_(rule),
        state_(rule.initial_state()),
        tensors_{torch::full({}, state_.scale), torch::empty({}), torch::zeros({}, torch::kInt),
                 torch::full({}, state_.hysteresis_left, torch::kInt)} {}

  void iterate(int64_t count, bool found_inf) {
    const auto flag = torch::full({}, found_inf ? 1.0F : 0.0F);
    for (int64_t i = 0; i < count; ++i) {
      state_ = rule_.next(state_, found_inf);
      mezzo::detail::update_scale_(rule_, tensors_, flag);
    }
    ASSERT_EQ(tensors_.scale.item<float>(), state_.scale);
    ASSERT_EQ(tensors_.growth_tracker.item<int32_t>(), state_.growth_tracker);
  }
  float scale() const { return state_.scale; }

 private:
  LossScale rule_;
  mezzo::LossScaleState state_;
  mezzo::detail::ScaleTensors tensors_;
};

struct HysteresisPoint {
  double init_scale, growth_factor, backoff_factor;
  int64_t growth_interval, hysteresis;
};

void expect_apexs_scales(const HysteresisPoint& point, int64_t extra_infs, int64_t extra_clean) {
  Hysteresis machine(LossScale::dynamic({.init_scale = point.init_scale,
                                         .growth_factor = point.growth_factor,
                                         .backoff_factor = point.backoff_factor,
                                         .growth_interval = point.growth_interval,
                                         .hysteresis = point.hysteresis}));
  auto expected = static_cast<float>(point.init_scale);
  machine.iterate(point.hysteresis - 1, true);
  EXPECT_EQ(machine.scale(), expected) << "overflows that hysteresis lets pass";
  machine.iterate(point.growth_interval - 1, false);
  EXPECT_EQ(machine.scale(), expected) << "one short of growing";

  machine.iterate(point.hysteresis + extra_infs, true);
  for (int64_t i = 0; i < 1 + extra_infs; ++i) {  // Apex ends at 0, mezzo at its floor
    expected = std::max(static_cast<float>(expected * point.backoff_factor),
                        static_cast<float>(mezzo::kDefaultMinScale));
  }
  EXPECT_EQ(machine.scale(), expected) << "every overflow after those backs off";

  machine.iterate(point.growth_interval + extra_clean, false);
  for (int64_t i = 0; i < 1 + extra_clean / point.growth_interval; ++i) {
    const float grown = expected * static_cast<float>(point.growth_factor);
    if (std::isfinite(grown)) expected = grown;
  }
  EXPECT_EQ(machine.scale(), expected) << "every interval grows";
}

TEST(ApexHysteresis, MovesTheScaleAsInApexsGrid) {
  for (const double init_scale : {1.0, 1024.0, 65536.0}) {
    for (const double growth_factor : {2.0, 4.0}) {
      for (const double backoff_factor : {0.5, 0.25}) {
        for (const int64_t growth_interval : {10, 100}) {
          for (const int64_t hysteresis : {10, 100}) {
            const HysteresisPoint point{init_scale, growth_factor, backoff_factor, growth_interval,
                                        hysteresis};
            // Apex draws the numbers of further iterations from [0, 1000].
            expect_apexs_scales(point, 0, 0);
            expect_apexs_scales(point, 7, 333);
            expect_apexs_scales(point, 313, 1000);
          }
        }
      }
    }
  }
}

TEST(ApexHysteresis, HasNoGrowthFactorOfOne) {
  EXPECT_THROW(LossScale::dynamic({.growth_factor = 1.0}), c10::Error);
  EXPECT_NO_THROW(LossScale::fixed(1024));  // which is what never grows
}

}  // namespace
