#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/atomic_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/object_parts.h>

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ios>
#include <limits>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// What needs no archive: numbers, strings, tensors, generators.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <std::integral T>
requires(sizeof(T) <= sizeof(std::int64_t)) class IntegerPart final : public CheckpointPart {
 public:
  explicit IntegerPart(T& value) : value_(value) {}
  const char* kind() const override { return std::same_as<T, bool> ? "boolean" : "integer"; }
  std::string value_in_common() const override { return std::to_string(wide(value_)); }

  SavedValue save() const override {
    if constexpr (std::same_as<T, bool>) return {c10::IValue(value_)};
    TORCH_CHECK(std::in_range<std::int64_t>(wide(value_)), "the integer ", wide(value_),
                " is beyond std::int64_t; save it as a string, or in two parts");
    return {c10::IValue(static_cast<std::int64_t>(value_))};
  }

  std::function<void()> load(SavedValue saved) const override {
    const std::int64_t number =
        saved.value.isBool() ? std::int64_t{saved.value.toBool()} : saved.value.toInt();
    TORCH_CHECK(std::cmp_greater_equal(number, wide(std::numeric_limits<T>::min())) &&
                    std::cmp_less_equal(number, wide(std::numeric_limits<T>::max())),
                "the file has the integer ", number,
                ", which the variable's type cannot hold; load it into a std::int64_t");
    return [this, number] { value_ = static_cast<T>(number); };
  }

 private:
  static auto wide(T value) {
    if constexpr (std::unsigned_integral<T>) {
      return static_cast<std::uint64_t>(value);
    } else {
      return static_cast<std::int64_t>(value);
    }
  }

  T& value_;
};

template <std::floating_point T>
requires(sizeof(T) <= sizeof(double)) class RealPart final : public CheckpointPart {
 public:
  explicit RealPart(T& value) : value_(value) {}
  const char* kind() const override { return "real number"; }
  std::string value_in_common() const override { return c10::str(std::hexfloat, value_); }

  SavedValue save() const override { return {c10::IValue(static_cast<double>(value_))}; }

  std::function<void()> load(SavedValue saved) const override {
    const double number = saved.value.toDouble();
    constexpr double kLargest = std::numeric_limits<T>::max();
    TORCH_CHECK(nonfinite_bits(number) || std::abs(number) <= kLargest,
                "the file has the real number ", number,
                ", which the variable's type cannot hold; load it into a double");
    return [this, number] { value_ = static_cast<T>(number); };
  }

 private:
  T& value_;
};

class StringPart final : public CheckpointPart {
 public:
  explicit StringPart(std::string& value) : value_(value) {}
  const char* kind() const override { return "string"; }
  std::string value_in_common() const override { return crc32c_text(value_.data(), value_.size()); }

  SavedValue save() const override { return {c10::IValue(value_)}; }

  std::function<void()> load(SavedValue saved) const override {
    return [this, text = saved.value.toStringRef()] { value_ = text; };
  }

 private:
  std::string& value_;
};

/// The tensor as it is written: without the rest of a storage that it is a view of.
inline at::Tensor savable(const at::Tensor& tensor) {
  const at::Tensor detached = tensor.detach();
  const bool is_whole =
      detached.layout() != at::kStrided || detached.storage().nbytes() == detached.nbytes();
  return is_whole ? detached : detached.clone();
}

class TensorPart final : public CheckpointPart {
 public:
  explicit TensorPart(at::Tensor& tensor) : tensor_(tensor) {}
  const char* kind() const override { return "tensor"; }

  SavedValue save() const override {
    TORCH_CHECK(tensor_.defined(), "the tensor is undefined; give it a value before saving");
    check_not_averaged("the tensor", tensor_);
    return {c10::IValue(savable(tensor_))};
  }

  std::function<void()> load(SavedValue saved) const override {
    return [this, read = saved.value.toTensor()] {
      if (!tensor_.defined()) {
        tensor_ = read;
        return;
      }
      TORCH_CHECK(tensor_.scalar_type() == read.scalar_type() && tensor_.layout() == read.layout(),
                  "the file has ", tensor_words(read), ", and the tensor here is ",
                  tensor_words(tensor_),
                  "; make it of the dtype and layout that it had, or give an "
                  "undefined torch::Tensor");
      tensor_.set_data(read.to(tensor_.device()));
    };
  }

  /// Loading gives the tensor other memory, and leaves its own alone.
  std::function<void()> snapshot() const override {
    if (!tensor_.defined()) return [this] { tensor_ = at::Tensor(); };
    check_not_averaged("the tensor", tensor_);
    return [this, handle = tensor_, memory = tensor_.variable_data()] {
      tensor_ = handle;
      tensor_.set_data(memory);
    };
  }

 private:
  at::Tensor& tensor_;
};

/// Tensors whose memory is others' too, as what GradAllReduce::residuals gives: it is kept, and
/// what is read copied there.
class TensorsPart final : public CheckpointPart {
 public:
  explicit TensorsPart(std::vector<at::Tensor>& tensors) : tensors_(tensors) {}
  const char* kind() const override { return "tensors"; }

  std::string layout() const override {
    std::ostringstream lines;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      TORCH_CHECK(tensors_[i].defined(), "tensor ", i,
                  " is undefined; give it a value before saving or loading");
      lines << "tensor " << i << ": " << tensors_[i].scalar_type() << ' ' << tensors_[i].sizes()
            << '\n';
    }
    return lines.str();
  }

  SavedValue save() const override {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const at::Tensor& tensor : tensors_) list.push_back(savable(tensor));
    return {c10::IValue(list)};
  }

  std::function<void()> load(SavedValue saved) const override {
    const auto& list = saved.value.toListRef();
    TORCH_CHECK(list.size() == tensors_.size(), "the file has ", list.size(),
                " tensors, and the vector here ", tensors_.size(), "; make it as long as it was");
    return [this, saved] {
      for (std::size_t i = 0; i < tensors_.size(); ++i) {
        tensors_[i].copy_(saved.value.toListRef()[i].toTensor());
      }
    };
  }

 private:
  std::vector<at::Tensor>& tensors_;
};

class GeneratorPart final : public CheckpointPart {
 public:
  explicit GeneratorPart(at::Generator& generator) : generator_(generator) {}
  const char* kind() const override { return "generator"; }
  std::string value_in_common() const override {
    if (!generator_.defined()) return "undefined";
    const at::Tensor state = state_of(generator_);
    return crc32c_text(state.const_data_ptr(), state.nbytes());
  }

  SavedValue save() const override {
    TORCH_CHECK(generator_.defined(), "the generator is undefined; make it before saving");
    return {c10::IValue(state_of(generator_))};
  }

  std::function<void()> load(SavedValue saved) const override {
    return [this, state = saved.value.toTensor()] {
      TORCH_CHECK(generator_.defined(), "the generator is undefined; make it before loading");
      set_state(generator_, state.cpu());
    };
  }

 private:
  at::Generator& generator_;
};

/// The default generators of the CPU and of CUDA devices.
class RandomStatesPart final : public CheckpointPart {
 public:
  const char* kind() const override { return "random states"; }

  SavedValue save() const override {
    c10::impl::GenericList states(c10::AnyType::get());
    for (const at::Generator& generator : default_generators(CudaDevices::all)) {
      states.push_back(state_of(generator));
    }
    return {c10::IValue(states)};
  }

  std::function<void()> load(SavedValue saved) const override {
    return [saved] {
      const auto& states = saved.value.toListRef();
      std::vector<at::Generator> generators = default_generators(CudaDevices::all);
      if (states.size() != generators.size()) {
        TORCH_WARN("The checkpoint has random states of ", states.size() - 1,
                   " CUDA devices, and here are ", generators.size() - 1,
                   ": devices without one go on with their own, and the run will not repeat bit "
                   "for bit what it would have been.");
      }
      for (std::size_t i = 0; i < std::min(states.size(), generators.size()); ++i) {
        set_state(generators[i], states[i].toTensor().cpu());
      }
    };
  }

  /// Another number of ranks cannot go on where these stopped. Each rank begins anew, from a seed
  /// that it draws from the CPU state of rank 0 and the salt, so that it is the same each time.
  std::function<void()> load_on_other_ranks(const SavedValue& of_rank_0,
                                            const std::string& salt) const override {
    const at::Tensor state = of_rank_0.value.toListRef().at(0).toTensor().cpu().contiguous();
    const auto* const bytes = state.const_data_ptr<std::uint8_t>();
    std::vector<std::uint32_t> words(bytes, bytes + state.numel());
    for (const char c : salt) words.push_back(static_cast<unsigned char>(c));
    std::seed_seq sequence(words.begin(), words.end());
    const std::uint64_t seed = std::mt19937_64(sequence)();
    return [seed] {
      for (at::Generator& generator : default_generators(CudaDevices::all)) {
        const std::scoped_lock lock(generator.mutex());
        generator.set_current_seed(seed);
      }
    };
  }
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
