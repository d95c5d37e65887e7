#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/sha256.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <ios>
#include <limits>
#include <string>
#include <utility>

// Plain values: where training stands in its data, the best score so far, the name of the run.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string all_of(const ByteSource& source) {
  std::string bytes(source.size, '\0');
  source.read(0, bytes.data(), bytes.size());
  return bytes;
}

inline std::uint64_t only_number_of(const ByteSource& source) {
  TORCH_CHECK(source.size == sizeof(std::uint64_t), "it has ", source.size,
              " bytes, and a number has 8");
  return number_at<std::uint64_t>(all_of(source).data());
}

inline void write_number(const ByteSink& sink, std::uint64_t number) {
  std::string bytes;
  append_number(bytes, number);
  sink(bytes.data(), bytes.size());
}

template <std::integral T>
requires(sizeof(T) <= sizeof(std::int64_t)) class IntegerPart final : public CheckpointPart {
 public:
  explicit IntegerPart(T& value) : value_(value) {}
  const char* kind() const override { return std::same_as<T, bool> ? "boolean" : "integer"; }
  std::string value_in_common() const override { return std::to_string(wide(value_)); }

  void write(const ByteSink& sink) const override {
    TORCH_CHECK(std::in_range<std::int64_t>(wide(value_)), "the integer ", wide(value_),
                " is beyond int64");
    write_number(sink, static_cast<std::uint64_t>(value_));
  }

  std::function<void()> decode(const ByteSource& source,
                               std::optional<c10::Device>) const override {
    const auto number = static_cast<std::int64_t>(only_number_of(source));
    TORCH_CHECK(fits(number), "the file has the integer ", number,
                ", which the variable's type cannot hold");
    return [this, number] { value_ = static_cast<T>(number); };
  }

 private:
  static auto wide(T value) {
    if constexpr (std::unsigned_integral<T>)
      return static_cast<std::uint64_t>(value);
    else
      return static_cast<std::int64_t>(value);
  }
  static bool fits(std::int64_t number) {
    return std::cmp_greater_equal(number, wide(std::numeric_limits<T>::min())) &&
           std::cmp_less_equal(number, wide(std::numeric_limits<T>::max()));
  }

  T& value_;
};

template <std::floating_point T>
requires(sizeof(T) <= sizeof(double)) class RealPart final : public CheckpointPart {
 public:
  explicit RealPart(T& value) : value_(value) {}
  const char* kind() const override { return "real number"; }
  std::string value_in_common() const override { return c10::str(std::hexfloat, value_); }

  void write(const ByteSink& sink) const override {
    write_number(sink, std::bit_cast<std::uint64_t>(static_cast<double>(value_)));
  }

  std::function<void()> decode(const ByteSource& source,
                               std::optional<c10::Device>) const override {
    const auto number = std::bit_cast<double>(only_number_of(source));
    constexpr double kLargest = std::numeric_limits<T>::max();
    TORCH_CHECK(nonfinite_bits(number) || std::abs(number) <= kLargest,
                "the file has the real number ", number, ", which the variable's type cannot hold");
    return [this, number] { value_ = static_cast<T>(number); };
  }

 private:
  T& value_;
};

class StringPart final : public CheckpointPart {
 public:
  explicit StringPart(std::string& value) : value_(value) {}
  const char* kind() const override { return "string"; }
  std::string value_in_common() const override { return digest_text(value_.data(), value_.size()); }

  void write(const ByteSink& sink) const override { sink(value_.data(), value_.size()); }

  std::function<void()> decode(const ByteSource& source,
                               std::optional<c10::Device>) const override {
    return [this, text = all_of(source)]() mutable { value_.swap(text); };
  }

 private:
  std::string& value_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
