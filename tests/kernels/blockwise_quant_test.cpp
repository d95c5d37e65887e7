// Blockwise quantization: bitsandbytes' qvals and absmax, on every instruction set.

#include <mezzo/kernels/adamw8bit_cpu.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::detail::CpuIsa;
using mezzo::detail::num_quant_blocks;

struct Blocks {
  std::vector<uint8_t> qvals;
  std::vector<float> absmax;
  bool operator==(const Blocks&) const = default;
};

/// Converts blocks with the CPU kernel's BlockQuantizer.
template <class Element, class IsSigned, class Vec>
struct ConvertKernel {
  C10_ALWAYS_INLINE static void run(uint8_t* qvals, float* absmax, float* values, int64_t count,
                                    bool quantizes) {
    using Converter = mezzo::detail::BlockQuantizer<Vec, IsSigned::value>;
    for (int64_t begin = 0; begin < count; begin += mezzo::detail::kQuantBlockSize) {
      const int64_t block_count = std::min(mezzo::detail::kQuantBlockSize, count - begin);
      float& block_absmax = absmax[begin / mezzo::detail::kQuantBlockSize];
      if (quantizes) {
        Converter::quantize(values + begin, qvals + begin, block_absmax, block_count);
      } else {
        Converter::dequantize(qvals + begin, block_absmax, values + begin, block_count);
      }
    }
  }
};

void convert(bool is_signed, Blocks& blocks, std::vector<float>& values, bool quantizes,
             CpuIsa isa) {
  const auto run = is_signed
                       ? mezzo::detail::kernel_for_isa<ConvertKernel, float, std::true_type>(isa)
                       : mezzo::detail::kernel_for_isa<ConvertKernel, float, std::false_type>(isa);
  run(blocks.qvals.data(), blocks.absmax.data(), values.data(), static_cast<int64_t>(values.size()),
      quantizes);
}

Blocks quantize(bool is_signed, std::vector<float> values, CpuIsa isa) {
  Blocks blocks{std::vector<uint8_t>(values.size()),
                std::vector<float>(static_cast<std::size_t>(
                    num_quant_blocks(static_cast<int64_t>(values.size()))))};
  convert(is_signed, blocks, values, /*quantizes=*/true, isa);
  return blocks;
}

std::vector<float> dequantize(bool is_signed, Blocks blocks, CpuIsa isa) {
  std::vector<float> values(blocks.qvals.size());
  convert(is_signed, blocks, values, /*quantizes=*/false, isa);
  return values;
}

std::vector<CpuIsa> supported_isas() {
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa : {CpuIsa::scalar, CpuIsa::vector128, CpuIsa::avx2, CpuIsa::avx512}) {
    if (mezzo::detail::has_isa(isa)) isas.push_back(isa);
  }
  return isas;
}

/// bitsandbytes' map in float64: decade i of [0, 1] has 2^i signed values, or twice as many
/// unsigned, in the middles of as many equal intervals.
std::vector<double> make_map(bool is_signed) {
  std::vector<double> map{0.0, 1.0};
  for (int i = 0; i < 7; ++i) {
    const int values = is_signed ? 1 << i : 2 << i;
    for (int j = 0; j < values; ++j) {
      const double value = std::pow(10.0, i - 6) * (0.1 + 0.9 * (j + 0.5) / values);
      map.push_back(value);
      if (is_signed) map.push_back(-value);
    }
  }
  std::sort(map.begin(), map.end());
  return map;
}

/// The values of blockwise_quant.py.
std::vector<float> recorded_values(const std::string& kind, uint64_t seed) {
  if (kind == "zero") return std::vector<float>(256);
  if (kind == "one") {
    std::vector<float> values(256);
    values[100] = 2.5F;
    return values;
  }
  const auto numbers = [](std::size_t count, uint64_t state) {
    std::vector<int64_t> drawn(count);
    for (int64_t& number : drawn) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      number = static_cast<int64_t>(state >> 40);
    }
    return drawn;
  };
  const std::size_t size = kind == "short" ? 77 : 256;
  const std::vector<int64_t> drawn = numbers(4 * size, seed);
  const std::vector<int64_t> more = numbers(size, seed + 1);
  std::vector<float> values(size);
  for (std::size_t i = 0; i < size; ++i) {
    const int64_t four = drawn[4 * i] + drawn[4 * i + 1] + drawn[4 * i + 2] + drawn[4 * i + 3];
    const auto sum = static_cast<double>(four / 4 - (1 << 23));
    const double value = kind == "mixed"      ? std::ldexp(sum, -static_cast<int>(more[i] % 40))
                         : kind == "negative" ? -std::abs(sum) / 1024
                         : kind == "tiny"     ? std::ldexp(sum, -120)
                         : kind == "huge"     ? std::ldexp(sum, 100)
                                              : sum / 1024;
    values[i] = static_cast<float>(value);
  }
  return values;
}

TEST(BlockwiseQuant, MatchesBitsandbytesQvalsAndAbsmax) {
  std::ifstream file(std::filesystem::path(__FILE__).parent_path() / "data" /
                     "blockwise_quant.txt");
  std::string line;
  int num_cases = 0;
  while (std::getline(file, line)) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    std::string kind, absmax_text, hex;
    uint64_t seed = 0;
    bool is_signed = false;
    words >> kind >> seed >> is_signed >> absmax_text >> hex;
    std::vector<float> values = recorded_values(kind, seed);
    if (!is_signed) {
      for (float& value : values) value = std::abs(value);
    }
    ++num_cases;
    ASSERT_EQ(hex.size(), 2 * values.size()) << line;
    for (const CpuIsa isa : supported_isas()) {
      const Blocks blocks = quantize(is_signed, values, isa);
      EXPECT_EQ(blocks.absmax, std::vector{std::strtof(absmax_text.c_str(), nullptr)}) << kind;
      if (blocks.absmax[0] == 0.0F) continue;  // all qvals dequantize to 0
      for (std::size_t i = 0; i < values.size(); ++i) {
        const int expected = std::stoi(hex.substr(2 * i, 2), nullptr, 16);
        ASSERT_EQ(blocks.qvals[i], expected) << kind << " " << seed << ", element " << i;
      }
    }
  }
  EXPECT_EQ(num_cases, 48);
}

TEST(BlockwiseQuant, DequantizesEveryQvalToMapValue) {
  for (const bool is_signed : {true, false}) {
    const std::vector<double> map = make_map(is_signed);
    Blocks all{std::vector<uint8_t>(256), {1.0F}};
    for (std::size_t i = 0; i < 256; ++i) all.qvals[i] = static_cast<uint8_t>(i);
    for (const CpuIsa isa : supported_isas()) {
      const std::vector<float> values = dequantize(is_signed, all, isa);
      for (std::size_t i = 0; i < 256; ++i) {
        ASSERT_NEAR(values[i], map[i], std::abs(map[i]) * 1e-6) << i;
      }
      EXPECT_EQ(values[255], 1.0F);
      EXPECT_EQ(values[is_signed ? 127 : 0], 0.0F);
    }
  }
}

/// Values between any two neighbors of the map, and close to their middle.
TEST(BlockwiseQuant, RoundsToNearestQval) {
  for (const bool is_signed : {true, false}) {
    const std::vector<double> map = make_map(is_signed);
    std::vector<float> values;
    for (std::size_t i = 0; i + 1 < map.size(); ++i) {
      const double middle = (map[i] + map[i + 1]) / 2;
      for (const double nearness : {1e-6, 1e-3, 0.1, 0.5, 1.0}) {
        values.push_back(static_cast<float>(middle + (map[i] - middle) * nearness));
        values.push_back(static_cast<float>(middle + (map[i + 1] - middle) * nearness));
      }
    }
    for (std::size_t begin = 0; begin < values.size(); begin += 255) {
      std::vector<float> block{1.0F};  // an absmax of 1
      block.insert(
          block.end(), values.begin() + static_cast<std::ptrdiff_t>(begin),
          values.begin() + static_cast<std::ptrdiff_t>(std::min(begin + 255, values.size())));
      for (const CpuIsa isa : supported_isas()) {
        const Blocks blocks = quantize(is_signed, block, isa);
        for (std::size_t i = 0; i < block.size(); ++i) {
          double min_distance = 2;
          for (const double value : map)
            min_distance = std::min(min_distance, std::abs(value - block[i]));
          const double distance = std::abs(map[blocks.qvals[i]] - block[i]);
          ASSERT_LE(distance, min_distance + std::abs(block[i]) * 1e-6) << block[i];
        }
      }
    }
  }
}

TEST(BlockwiseQuant, BitwiseIdenticalOnEveryIsa) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const bool is_signed : {true, false}) {
    for (int round = 0; round < 200; ++round) {
      std::vector<float> values(1 + random() % 1500);
      const float spread = std::pow(10.0F, static_cast<float>(random() % 70) - 40.0F);
      for (float& value : values) {
        value = normal(random) * std::exp(-static_cast<float>(random() % 16)) * spread;
        if (!is_signed) value = std::abs(value);
      }
      const Blocks expected = quantize(is_signed, values, supported_isas().front());
      const std::vector<float> wide = dequantize(is_signed, expected, supported_isas().front());
      for (const CpuIsa isa : supported_isas()) {
        ASSERT_EQ(quantize(is_signed, values, isa), expected);
        ASSERT_EQ(dequantize(is_signed, expected, isa), wide);
      }
    }
  }
}

TEST(BlockwiseQuant, NonfiniteValueAffectsItsBlockOnly) {
  for (const float nonfinite :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const CpuIsa isa : supported_isas()) {
      std::vector<float> values(512, 0.5F);
      values[300] = nonfinite;
      const std::vector<float> wide = dequantize(true, quantize(true, values, isa), isa);
      for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(wide[i], 0.5F);
      for (const int i : {300, 301}) {
        uint32_t bits;
        mezzo::detail::reinterpret_bits(wide[static_cast<std::size_t>(i)], bits);
        EXPECT_EQ(bits & 0x7F800000U, 0x7F800000U) << "finite";
      }
    }
  }
}

TEST(BlockwiseQuant, SubnormalBlockBecomesZero) {
  for (const CpuIsa isa : supported_isas()) {
    const Blocks blocks = quantize(true, std::vector<float>(20, 1e-40F), isa);
    EXPECT_EQ(blocks.absmax[0], 0.0F);
    for (const float value : dequantize(true, blocks, isa)) ASSERT_EQ(value, 0.0F);
  }
}

}  // namespace
