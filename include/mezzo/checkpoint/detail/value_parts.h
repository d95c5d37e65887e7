#pragma once

#include <mezzo/base/detail/crc32c.h>
#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/object_parts.h>
#include <mezzo/checkpoint/detail/part_of.h>

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ios>
#include <istream>
#include <locale>
#include <memory>
#include <mutex>
#include <ostream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

// Parts that need no archive: numbers, strings, tensors, generators.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

class IntegerPart final : public CheckpointPart {
 public:
  explicit IntegerPart(IntegerAccess access) : access_(std::move(access)) {}
  const char* kind() const override { return access_.is_boolean ? "boolean" : "integer"; }
  std::string value_in_common() const override { return std::to_string(access_.get()); }

  SavedValue save() const override {
    const std::int64_t value = access_.get();
    return {access_.is_boolean ? c10::IValue(value != 0) : c10::IValue(value)};
  }

  std::function<void()> load(SavedValue saved) const override {
    const std::int64_t number =
        saved.value.isBool() ? std::int64_t{saved.value.toBool()} : saved.value.toInt();
    check_fits(number, access_);
    return [this, number] { access_.set(number); };
  }

  static void check_fits(std::int64_t number, const IntegerAccess& range) {
    TORCH_CHECK(number >= range.least && std::cmp_less_equal(number, range.most),
                "the file has the integer ", number,
                ", which the variable's type cannot hold; load it into a std::int64_t");
  }

 private:
  IntegerAccess access_;
};

/// A vector of integers, stored as a tensor, since it may be as long as a data set.
class IntegersPart final : public CheckpointPart {
 public:
  IntegersPart(std::function<std::vector<std::int64_t>()> get,
               std::function<void(const std::vector<std::int64_t>&)> set, IntegerAccess range)
      : get_(std::move(get)), set_(std::move(set)), range_(std::move(range)) {}
  const char* kind() const override { return "integers"; }
  std::string value_in_common() const override {
    const std::vector<std::int64_t> values = get_();
    return crc32c_text(values.data(), values.size() * sizeof(std::int64_t));
  }

  SavedValue save() const override { return {c10::IValue(at::tensor(get_(), at::kLong))}; }

  std::function<void()> load(SavedValue saved) const override {
    const at::Tensor read = saved.value.toTensor().to(at::kCPU, at::kLong).contiguous();
    const auto* const begin = read.const_data_ptr<std::int64_t>();
    std::vector<std::int64_t> values(begin, begin + read.numel());
    for (const std::int64_t value : values) IntegerPart::check_fits(value, range_);
    return [this, values = std::move(values)] { set_(values); };
  }

 private:
  std::function<std::vector<std::int64_t>()> get_;
  std::function<void(const std::vector<std::int64_t>&)> set_;
  IntegerAccess range_;
};

class RealPart final : public CheckpointPart {
 public:
  RealPart(std::function<double()> get, std::function<void(double)> set, double largest)
      : get_(std::move(get)), set_(std::move(set)), largest_(largest) {}
  const char* kind() const override { return "real number"; }
  std::string value_in_common() const override { return c10::str(std::hexfloat, get_()); }

  SavedValue save() const override { return {c10::IValue(get_())}; }

  std::function<void()> load(SavedValue saved) const override {
    const double number = saved.value.toDouble();
    TORCH_CHECK(nonfinite_bits(number) || std::abs(number) <= largest_,
                "the file has the real number ", number,
                ", which the variable's type cannot hold; load it into a double");
    return [this, number] { set_(number); };
  }

 private:
  std::function<double()> get_;
  std::function<void(double)> set_;
  double largest_;
};

/// A random engine of the standard library, stored as the text that it writes.
class EnginePart final : public CheckpointPart {
 public:
  EnginePart(std::function<void(std::ostream&)> write, std::function<void(std::istream&)> read)
      : write_(std::move(write)), read_(std::move(read)) {}
  const char* kind() const override { return "engine"; }
  std::string value_in_common() const override {
    const std::string state = text();
    return crc32c_text(state.data(), state.size());
  }

  SavedValue save() const override { return {c10::IValue(text())}; }

  std::function<void()> load(SavedValue saved) const override {
    return [this, state = saved.value.toStringRef()] {
      std::istringstream stream(state);
      stream.imbue(std::locale::classic());
      read_(stream);
      TORCH_CHECK(text() == state,
                  "the file has the state of another engine; add one of the type that was saved");
    };
  }

 private:
  std::string text() const {
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    write_(stream);
    return stream.str();
  }

  std::function<void(std::ostream&)> write_;
  std::function<void(std::istream&)> read_;
};

/// A value that the user's callables return and accept; `part` is the part of that value.
class CallablePart final : public CheckpointPart {
 public:
  CallablePart(PartPointer part, std::function<void()> get, std::function<void()> set)
      : part_(std::move(part)), get_(std::move(get)), set_(std::move(set)) {}
  const char* kind() const override { return part_->kind(); }
  std::string value_in_common() const override {
    get_();
    return part_->value_in_common();
  }

  SavedValue save() const override {
    get_();
    return part_->save();
  }

  std::function<void()> load(SavedValue saved) const override {
    return [this, apply = part_->load(std::move(saved))] {
      apply();
      set_();
    };
  }

 private:
  PartPointer part_;
  std::function<void()> get_, set_;
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

class TensorPart final : public CheckpointPart {
 public:
  explicit TensorPart(at::Tensor& tensor) : tensor_(tensor) {}
  const char* kind() const override { return "tensor"; }
  std::string value_in_common() const override { return crc_of(save()); }

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

  /// Loading gives the tensor new memory and leaves its old memory alone.
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

/// Tensors whose memory is shared, such as the result of GradAllReduce::residuals. Loading copies
/// into that memory.
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

  std::string value_in_common() const override { return crc_of(save()); }

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

/// The states of the default generators of the CPU and of CUDA devices.
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

  /// Seeds the generators anew, since another number of ranks cannot continue the saved sequences.
  /// The seed follows from rank 0's CPU state and the salt, so it is the same at each load.
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

MEZZO_INLINE PartPointer integer_part(IntegerAccess access) {
  return std::make_shared<IntegerPart>(std::move(access));
}

MEZZO_INLINE PartPointer integers_part(std::function<std::vector<std::int64_t>()> get,
                                       std::function<void(const std::vector<std::int64_t>&)> set,
                                       IntegerAccess range) {
  return std::make_shared<IntegersPart>(std::move(get), std::move(set), std::move(range));
}

MEZZO_INLINE PartPointer real_part(std::function<double()> get, std::function<void(double)> set,
                                   double largest) {
  return std::make_shared<RealPart>(std::move(get), std::move(set), largest);
}

MEZZO_INLINE PartPointer string_part(std::string& value) {
  return std::make_shared<StringPart>(value);
}

MEZZO_INLINE PartPointer engine_part(std::function<void(std::ostream&)> write,
                                     std::function<void(std::istream&)> read) {
  return std::make_shared<EnginePart>(std::move(write), std::move(read));
}

MEZZO_INLINE PartPointer tensor_part(at::Tensor& tensor) {
  return std::make_shared<TensorPart>(tensor);
}

MEZZO_INLINE PartPointer tensors_part(std::vector<at::Tensor>& tensors) {
  return std::make_shared<TensorsPart>(tensors);
}

MEZZO_INLINE PartPointer generator_part(at::Generator& generator) {
  return std::make_shared<GeneratorPart>(generator);
}

MEZZO_INLINE PartPointer random_states_part() { return std::make_shared<RandomStatesPart>(); }

MEZZO_INLINE PartPointer callable_part(PartPointer part, std::function<void()> get,
                                       std::function<void()> set) {
  return std::make_shared<CallablePart>(std::move(part), std::move(get), std::move(set));
}

MEZZO_INLINE std::int64_t signed_of(std::uint64_t value) {
  TORCH_CHECK(std::in_range<std::int64_t>(value), "the integer ", value,
              " is beyond std::int64_t; save it as a string, or in two parts");
  return static_cast<std::int64_t>(value);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
