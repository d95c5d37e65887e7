#include <mezzo/autocast/autocast.h>
#include <mezzo/diagnose/gemm_times.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

namespace {

using mezzo::GemmRow;
using mezzo::GemmShape;
using mezzo::GemmTimes;
using testing::HasSubstr;
using testing::Pair;
using testing::ThrowsMessage;
using testing::UnorderedElementsAre;

constexpr mezzo::GemmTimingOptions kQuick{.seconds = 1e-4};

std::map<GemmShape, int64_t> calls_by_shape(const GemmTimes& times) {
  std::map<GemmShape, int64_t> calls;
  for (const GemmRow& row : times.rows) calls[row.shape] = row.calls;
  return calls;
}

const GemmShape kLinear{.m = 5, .n = 6, .k = 3, .b_transposed = true};

TEST(BenchmarkGemms, FindsTheProductsOfAModelAndHowOftenEachComes) {
  torch::nn::Sequential model(torch::nn::Linear(3, 6), torch::nn::Linear(6, 3),
                              torch::nn::Linear(3, 6));
  const GemmTimes times = mezzo::benchmark_gemms(model, torch::ones({5, 3}), kQuick);
  EXPECT_THAT(
      calls_by_shape(times),
      UnorderedElementsAre(Pair(kLinear, 2),
                           Pair(GemmShape{.m = 5, .n = 3, .k = 6, .b_transposed = true}, 1)));
}

TEST(BenchmarkGemms, SeesBatchesAndBiasesAndTransposedFactors) {
  const auto model = [](const torch::Tensor& x) {
    const auto y = torch::bmm(x, x.transpose(1, 2));
    torch::baddbmm(y, x.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(1, 2));
    return torch::addmm(torch::ones({4}), torch::ones({3, 5}).t(), torch::ones({3, 4}));
  };
  const GemmTimes times = mezzo::benchmark_gemms(model, torch::ones({7, 2, 3}), kQuick);
  EXPECT_THAT(
      calls_by_shape(times),
      UnorderedElementsAre(
          Pair(GemmShape{.batch = 7, .m = 2, .n = 2, .k = 3, .b_transposed = true}, 1),
          Pair(
              GemmShape{
                  .batch = 7, .m = 2, .n = 2, .k = 3, .a_transposed = true, .b_transposed = true},
              1),
          Pair(GemmShape{.m = 5, .n = 4, .k = 3, .a_transposed = true}, 1)));
}

TEST(BenchmarkGemms, CountsAProductOnceUnderAutocast) {
  torch::nn::Linear model(3, 6);
  const mezzo::Autocast<torch::kCPU> autocast;
  const GemmTimes times = mezzo::benchmark_gemms(model, torch::ones({5, 3}), kQuick);
  EXPECT_THAT(calls_by_shape(times), UnorderedElementsAre(Pair(kLinear, 1)));
}

TEST(BenchmarkGemms, GivesATimeForEachDtypeOfTheDevice) {
  torch::nn::Linear model(8, 16);
  const GemmTimes times = mezzo::benchmark_gemms(model, torch::ones({8, 8}), kQuick);
  ASSERT_EQ(times.rows.size(), 1);
  EXPECT_EQ(times.device, torch::Device(torch::kCPU));
  EXPECT_GT(times.rows[0].as_is.float32, 0);
  EXPECT_GT(times.rows[0].as_is.float16, 0);
  EXPECT_GT(times.rows[0].as_is.bfloat16, 0);
  EXPECT_EQ(times.rows[0].as_is.tf32, std::nullopt);
  EXPECT_FALSE(times.rows[0].padded.has_value()) << "multiples of 8 already";
}

TEST(BenchmarkGemms, TellsAProductThatTakesLongerAndPutsItFirst) {
  const auto model = [](const torch::Tensor& x) {
    for (int i = 0; i < 3; ++i) torch::mm(torch::ones({8, 8}), torch::ones({8, 8}));
    return torch::mm(x, x);
  };
  const GemmTimes times =
      mezzo::benchmark_gemms(model, torch::ones({256, 256}), {.seconds = 0.001});
  ASSERT_EQ(times.rows.size(), 2);
  EXPECT_EQ(times.rows[0].shape.m, 256);
  EXPECT_GT(times.rows[0].as_is.float32, 4 * times.rows[1].as_is.float32);
}

TEST(BenchmarkGemms, TimesThePaddedShapeWhereThatIsAnother) {
  torch::nn::Linear model(3, 6);
  const GemmTimes times = mezzo::benchmark_gemms(model, torch::ones({5, 3}), kQuick);
  ASSERT_EQ(times.rows.size(), 1);
  ASSERT_TRUE(times.rows[0].padded.has_value());
  EXPECT_GT(times.rows[0].padded->float32, 0);
}

TEST(BenchmarkGemms, LeavesSettingsAndGradientsAlone) {
  torch::nn::Linear model(3, 6);
  at::globalContext().setFloat32MatmulPrecision("high");
  mezzo::benchmark_gemms(model, torch::ones({5, 3}), kQuick);
  EXPECT_EQ(at::globalContext().float32MatmulPrecision(), at::Float32MatmulPrecision::HIGH);
  at::globalContext().setFloat32MatmulPrecision("highest");
  EXPECT_TRUE(at::GradMode::is_enabled());
  EXPECT_FALSE(model->weight.grad().defined());
}

TEST(BenchmarkGemms, DrawsNoRandomNumbersOfItsOwn) {
  torch::nn::Sequential model(torch::nn::Linear(3, 6), torch::nn::Dropout(0.5));
  const torch::Tensor x = torch::ones({5, 3});
  torch::manual_seed(7);
  model->forward(x);
  const torch::Tensor after_a_forward_pass = torch::rand({4});
  torch::manual_seed(7);
  mezzo::benchmark_gemms(model, x, kQuick);
  EXPECT_TRUE(torch::equal(torch::rand({4}), after_a_forward_pass));
}

struct Forward : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return torch::mm(x, x); }
};

TEST(BenchmarkGemms, TakesModulesBehindPointersToo) {
  const GemmTimes times =
      mezzo::benchmark_gemms(std::make_shared<Forward>(), torch::ones({4, 4}), kQuick);
  EXPECT_THAT(calls_by_shape(times),
              UnorderedElementsAre(Pair(GemmShape{.m = 4, .n = 4, .k = 4}, 1)));
}

TEST(BenchmarkGemms, CountsTheConvolutionsThatItDoesNotTime) {
  torch::nn::Sequential model(torch::nn::Conv2d(1, 2, 3), torch::nn::Conv2d(2, 2, 3),
                              torch::nn::Flatten(), torch::nn::Linear(8, 3));
  const torch::Tensor image = torch::ones({5, 1, 6, 6});
  const auto table = [](const GemmTimes& times) {
    std::ostringstream out;
    out << times;
    return out.str();
  };
  const GemmTimes times = mezzo::benchmark_gemms(model, image, kQuick);
  EXPECT_EQ(times.convolutions, 2);
  EXPECT_EQ(times.rows.size(), 1U);
  EXPECT_THAT(table(times), HasSubstr("not timed: 2 convolutions; compare_precisions"));
  {
    const mezzo::Autocast<torch::kCPU> autocast;
    EXPECT_EQ(mezzo::benchmark_gemms(model, image, kQuick).convolutions, 2);
    // As traces of TorchScript call it: it is cast, calls itself, and then its newer overload.
    const auto bare_op = [](const torch::Tensor& x) {
      const auto y = at::_convolution(x, torch::ones({2, 1, 3, 3}), {}, {1, 1}, {0, 0}, {1, 1},
                                      /*transposed=*/false, {0, 0}, /*groups=*/1,
                                      /*benchmark=*/false, /*deterministic=*/false,
                                      /*cudnn_enabled=*/true);
      return y.flatten(1).mm(torch::ones({32, 2}));
    };
    EXPECT_EQ(mezzo::benchmark_gemms(bare_op, image, kQuick).convolutions, 1);
  }
  const auto bare = mezzo::benchmark_gemms(torch::nn::Linear(3, 6), torch::ones({5, 3}), kQuick);
  EXPECT_EQ(bare.convolutions, 0);
  EXPECT_THAT(table(bare), testing::Not(HasSubstr("not timed")));
  EXPECT_THAT([&] { mezzo::benchmark_gemms(torch::nn::Conv2d(1, 2, 3), image, kQuick); },
              ThrowsMessage<c10::Error>(HasSubstr("1 convolutions, which are not")));
}

TEST(BenchmarkGemms, SaysWhatItCannotTime) {
  const auto relu = [](const torch::Tensor& x) { return x.relu(); };
  const auto square = [](const torch::Tensor& x) { return x.mm(x); };
  const torch::Tensor x = torch::ones({2, 2});
  EXPECT_THAT([&] { mezzo::benchmark_gemms(relu, x, kQuick); },
              ThrowsMessage<c10::Error>(HasSubstr("called none of mm, addmm, bmm")));
  EXPECT_THAT([&] { mezzo::benchmark_gemms(square, x.to(torch::kMeta), kQuick); },
              ThrowsMessage<c10::Error>(HasSubstr("multiplies matrices on meta; move it to cpu")));
  EXPECT_THAT([&] { mezzo::benchmark_gemms(square, x, {.seconds = 0}); },
              ThrowsMessage<c10::Error>(HasSubstr("seconds is 0; it should be positive")));
  const auto nested = [&](const torch::Tensor& y) {
    return mezzo::benchmark_gemms(square, y, kQuick);
  };
  EXPECT_THAT([&] { mezzo::benchmark_gemms(nested, x, kQuick); },
              ThrowsMessage<c10::Error>(HasSubstr("within another benchmark_gemms")));
  EXPECT_NO_THROW(mezzo::benchmark_gemms(square, x, kQuick)) << "after an error as before";
}

TEST(GemmShape, IsPaddedToMultiplesOfEight) {
  const GemmShape shape{.batch = 3, .m = 1, .n = 8, .k = 17, .b_transposed = true};
  EXPECT_EQ(shape.padded(), (GemmShape{.batch = 3, .m = 8, .n = 8, .k = 24, .b_transposed = true}));
}

TEST(GemmTimes, PrintATableWithSumsOverCalls) {
  GemmTimes times;
  times.rows.push_back(
      {.shape = {.m = 5, .n = 6, .k = 3, .b_transposed = true},
       .calls = 2,
       .as_is = {.float32 = 10, .float16 = 20, .bfloat16 = 5.25},
       .padded = mezzo::GemmMicroseconds{.float32 = 8, .float16 = 4, .bfloat16 = 4}});
  times.rows.push_back({.shape = {.batch = 4, .m = 8, .n = 8, .k = 8},
                        .calls = 1,
                        .as_is = {.float32 = 1, .float16 = 1, .bfloat16 = 1},
                        .padded = std::nullopt});
  std::ostringstream table;
  table << times;
  EXPECT_EQ(table.str(),
            "matrix products on cpu, microseconds a call\n"
            " calls  shape                                        float32        tf32     float16  "
            "  bfloat16\n"
            "     2  5 x 3 . 3 x 6 T                                 10.0           -        20.0  "
            "       5.2\n"
            "          padded: 8 x 8 . 8 x 8 T                        8.0           -         4.0  "
            "       4.0\n"
            "     1  4 x (8 x 8 . 8 x 8)                              1.0           -         1.0  "
            "       1.0\n"
            "        all calls                                       21.0           -        41.0  "
            "      11.5\n"
            "        all calls, padded                               17.0           -         9.0  "
            "       9.0\n");
}

}  // namespace
