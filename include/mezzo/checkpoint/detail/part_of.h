#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/optim/optimizer.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <locale>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

// Makes the part of an object by its type. What does not depend on the type is compiled with
// checkpoint_impl.h.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// Defined in object_parts.h.
CheckpointPart module_part(std::function<std::shared_ptr<torch::nn::Module>()> module);
CheckpointPart optimizer_part(AnyOptimizer optimizer);
CheckpointPart archive_part(std::function<void(torch::serialize::OutputArchive&)> put,
                            std::function<void(torch::serialize::InputArchive&)> take);
CheckpointPart tensor_part(at::Tensor& tensor);
CheckpointPart tensors_part(std::vector<at::Tensor>& tensors);
CheckpointPart generator_part(at::Generator& generator);
CheckpointPart random_states_part();
/// Returns a holder's module. \throws c10::Error if it is null
std::shared_ptr<torch::nn::Module> held_module(torch::nn::Module* module);

template <class T>
concept IsModule = std::derived_from<T, torch::nn::Module>;

/// A torch::nn::ModuleHolder (`torch::nn::Linear`), std::shared_ptr or the like.
template <class T>
concept HoldsModule = requires(T& holder) {
  requires IsModule<std::remove_cvref_t<decltype(*holder)>>;
};

template <class T>
concept IsOptimizer = std::convertible_to<T&, AnyOptimizer>;

template <class T>
concept GoesThroughArchives = requires(torch::serialize::OutputArchive& output,
                                       torch::serialize::InputArchive& input, T& object) {
  output << std::as_const(object);
  input >> object;
};

/// A random engine of the standard library, such as std::mt19937, with stream operators.
template <class T>
concept IsEngine = std::uniform_random_bit_generator<T> &&
    requires(std::ostream& output, std::istream& input, T& engine) {
  output << std::as_const(engine);
  input >> engine;
};

template <class T>
struct IsVectorOfIntegers : std::false_type {};
template <std::integral T>
requires(!std::same_as<T, bool>) struct IsVectorOfIntegers<std::vector<T>> : std::true_type {
};

inline void check_value(bool is_right, const c10::IValue& value, const char* wanted) {
  TORCH_CHECK(is_right, "it is ", value_words(value), " in the file, and ", wanted, " here");
}

template <std::integral T>
std::int64_t integer_to_save(T value) {
  if constexpr (std::unsigned_integral<T> && sizeof(T) == sizeof(std::int64_t)) {
    TORCH_CHECK(value <= static_cast<T>(std::numeric_limits<std::int64_t>::max()), "the integer ",
                value, " is beyond std::int64_t; save it as a string, or in two parts");
  }
  return static_cast<std::int64_t>(value);
}

template <std::integral T>
T integer_read(std::int64_t number) {
  const T value = static_cast<T>(number);
  const bool fits = static_cast<std::int64_t>(value) == number && (value < T{}) == (number < 0);
  TORCH_CHECK(fits, "the file has the integer ", number,
              ", which the variable's type cannot hold; load it into a std::int64_t");
  return value;
}

/// Makes a part from `put`, which returns a value, and `read`, which checks one and returns what is
/// then assigned to `object`.
template <class T, class Put, class Read>
CheckpointPart value_part(const char* kind, T& object, Put put, Read read) {
  return {.kind = kind,
          .save = [put](const ParameterNames&) { return c10::IValue(put()); },
          .load =
              [&object, read](const c10::IValue& value, const LoadContext&) {
                return [&object, ready = std::make_shared<T>(read(value))] {
                  object = std::move(*ready);
                };
              }};
}

template <IsEngine T>
std::string engine_text(const T& engine) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  stream << engine;
  return stream.str();
}

template <IsEngine T>
T engine_read(const c10::IValue& value) {
  check_value(value.isString(), value, "an engine's text");
  T engine;
  std::istringstream stream(value.toStringRef());
  stream.imbue(std::locale::classic());
  stream >> engine;
  TORCH_CHECK(stream && engine_text(engine) == value.toStringRef(),
              "the file has the state of another engine; add one of the type that was saved");
  return engine;
}

template <class T>
CheckpointPart part_of(T& object) {
  static_assert(!std::is_const_v<T>,
                "mezzo::TrainingState::add: the object is const, and loading a checkpoint changes "
                "it; add one that is not const");
  if constexpr (IsModule<T>) {
    return module_part(
        [&object] { return std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &object); });
  } else if constexpr (HoldsModule<T>) {
    return module_part(
        [&object] { return held_module(static_cast<bool>(object) ? &*object : nullptr); });
  } else if constexpr (IsOptimizer<T>) {
    return optimizer_part(object);
  } else if constexpr (std::same_as<T, std::string>) {
    return value_part(
        "string", object, [&object] { return object; },
        [](const c10::IValue& value) {
          check_value(value.isString(), value, "a string");
          return value.toStringRef();
        });
  } else if constexpr (std::same_as<T, bool>) {
    return value_part(
        "bool", object, [&object] { return object; },
        [](const c10::IValue& value) {
          check_value(value.isBool(), value, "a bool");
          return value.toBool();
        });
  } else if constexpr (std::integral<T>) {
    return value_part(
        "integer", object, [&object] { return integer_to_save(object); },
        [](const c10::IValue& value) {
          check_value(value.isInt(), value, "an integer");
          return integer_read<T>(value.toInt());
        });
  } else if constexpr (std::floating_point<T>) {
    static_assert(sizeof(T) <= sizeof(double));
    return value_part(
        "real number", object, [&object] { return static_cast<double>(object); },
        [](const c10::IValue& value) {
          check_value(value.isDouble() || value.isInt(), value, "a real number");
          const double number = value.toScalar().toDouble();
          TORCH_CHECK(nonfinite_bits(number) ||
                          std::abs(number) <= static_cast<double>(std::numeric_limits<T>::max()),
                      "the file has the real number ", number,
                      ", which the variable's type cannot hold; load it into a double");
          return static_cast<T>(number);
        });
  } else if constexpr (std::derived_from<T, at::Tensor>) {
    return tensor_part(object);
  } else if constexpr (std::same_as<T, std::vector<at::Tensor>>) {
    return tensors_part(object);
  } else if constexpr (IsVectorOfIntegers<T>::value) {
    return value_part(
        "vector of integers", object,  // as a tensor, for it may be as long as a data set
        [&object] {
          std::vector<std::int64_t> all;
          for (const auto value : object) all.push_back(integer_to_save(value));
          return at::tensor(all, at::kLong);
        },
        [](const c10::IValue& value) {
          check_value(value.isTensor() && value.toTensor().scalar_type() == at::kLong, value,
                      "a vector of integers");
          const at::Tensor read = value.toTensor().contiguous();
          const auto* const begin = read.const_data_ptr<std::int64_t>();
          T all;
          for (std::int64_t i = 0; i < read.numel(); ++i) {
            all.push_back(integer_read<typename T::value_type>(begin[i]));
          }
          return all;
        });
  } else if constexpr (std::same_as<T, at::Generator>) {
    return generator_part(object);
  } else if constexpr (IsEngine<T>) {
    return value_part(
        "engine", object, [&object] { return engine_text(object); }, engine_read<T>);
  } else {
    static_assert(
        GoesThroughArchives<T>,
        "mezzo::TrainingState::add: torch::save and torch::load cannot take this type; add "
        "modules, optimizers, tensors, numbers, vectors of integers, strings and generators, give "
        "two callables that save and load one of these (add(name, save, load)), or give the type "
        "operator<< and operator>> for torch::serialize archives, and include its header and "
        "<torch/serialize/archive.h>");
    return archive_part(
        [&object](torch::serialize::OutputArchive& archive) { archive << std::as_const(object); },
        [&object](torch::serialize::InputArchive& archive) { archive >> object; });
  }
}

/// Makes a part of two callables: the value that `save` returns is stored, and given to `load`.
template <class Save, class Load>
CheckpointPart part_of_callables(Save save, Load load) {
  using Value = std::decay_t<std::invoke_result_t<Save&>>;
  static_assert(std::invocable<Load&, Value>,
                "mezzo::TrainingState::add: load does not take what save returns; let save() "
                "return a number, string, tensor or vector of integers, and load take it");
  const auto value = std::make_shared<Value>();
  const CheckpointPart part = part_of(*value);
  return {.kind = part.kind,
          .save =
              [value, save, part](const ParameterNames& names) mutable {
                *value = save();
                return part.save(names);
              },
          .load =
              [value, load, part](const c10::IValue& saved, const LoadContext& context) {
                return [value, load, apply = part.load(saved, context)]() mutable {
                  apply();
                  load(std::exchange(*value, Value()));
                };
              }};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
