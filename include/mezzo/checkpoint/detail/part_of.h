#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <istream>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

// Chooses the kind of part for an object by its type. The templates do only what needs the type;
// the parts themselves are compiled with checkpoint_impl.h.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using PartPointer = std::shared_ptr<const CheckpointPart>;

/// Access to an integer of any type.
struct IntegerAccess {
  std::function<std::int64_t()> get;  ///< \throws c10::Error for what std::int64_t cannot hold
  std::function<void(std::int64_t)> set;
  std::int64_t least = 0;
  std::uint64_t most = 0;
  bool is_boolean = false;
};

// Defined in object_parts.h and value_parts.h.
PartPointer module_part(std::function<std::shared_ptr<torch::nn::Module>()> module);
PartPointer optimizer_part(AnyOptimizer optimizer);
PartPointer archive_part(std::function<void(torch::serialize::OutputArchive&)> put,
                         std::function<void(torch::serialize::InputArchive&)> take,
                         std::function<bool()> differs_by_rank);
PartPointer integer_part(IntegerAccess access);
PartPointer integers_part(std::function<std::vector<std::int64_t>()> get,
                          std::function<void(const std::vector<std::int64_t>&)> set,
                          IntegerAccess range);
PartPointer real_part(std::function<double()> get, std::function<void(double)> set, double largest);
PartPointer string_part(std::string& value);
PartPointer engine_part(std::function<void(std::ostream&)> write,
                        std::function<void(std::istream&)> read);
PartPointer tensor_part(at::Tensor& tensor);
PartPointer tensors_part(std::vector<at::Tensor>& tensors);
PartPointer generator_part(at::Generator& generator);
PartPointer random_states_part();
PartPointer callable_part(PartPointer part, std::function<void()> get, std::function<void()> set);
/// Returns a holder's module. \throws c10::Error if it is null
std::shared_ptr<torch::nn::Module> held_module(torch::nn::Module* module);
std::int64_t signed_of(std::uint64_t value);

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

template <std::integral T>
std::int64_t wide(T value) {
  if constexpr (std::unsigned_integral<T> && sizeof(T) == sizeof(std::int64_t)) {
    return signed_of(value);
  } else {
    return static_cast<std::int64_t>(value);
  }
}

/// Returns the range of T, without access to a value.
template <std::integral T>
IntegerAccess range_of() {
  static_assert(sizeof(T) <= sizeof(std::int64_t));
  return {.get = nullptr,
          .set = nullptr,
          .least = static_cast<std::int64_t>(std::numeric_limits<T>::min()),
          .most = static_cast<std::uint64_t>(std::numeric_limits<T>::max()),
          .is_boolean = std::same_as<T, bool>};
}

template <std::integral T>
PartPointer part_of_integer(T& value) {
  IntegerAccess access = range_of<T>();
  access.get = [&value] { return wide(value); };
  access.set = [&value](std::int64_t number) { value = static_cast<T>(number); };
  return integer_part(std::move(access));
}

template <std::integral T>
PartPointer part_of_integers(std::vector<T>& values) {
  return integers_part(
      [&values] {
        std::vector<std::int64_t> all;
        all.reserve(values.size());
        for (const T value : values) all.push_back(wide(value));
        return all;
      },
      [&values](const std::vector<std::int64_t>& all) {
        std::vector<T> read;
        read.reserve(all.size());
        for (const std::int64_t value : all) read.push_back(static_cast<T>(value));
        values = std::move(read);
      },
      range_of<T>());
}

template <class T>
PartPointer part_of(T& object) {
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
    return string_part(object);
  } else if constexpr (std::integral<T>) {
    return part_of_integer(object);
  } else if constexpr (std::floating_point<T>) {
    static_assert(sizeof(T) <= sizeof(double));
    return real_part([&object] { return static_cast<double>(object); },
                     [&object](double number) { object = static_cast<T>(number); },
                     static_cast<double>(std::numeric_limits<T>::max()));
  } else if constexpr (std::derived_from<T, at::Tensor>) {
    return tensor_part(object);
  } else if constexpr (std::same_as<T, std::vector<at::Tensor>>) {
    return tensors_part(object);
  } else if constexpr (IsVectorOfIntegers<T>::value) {
    return part_of_integers(object);
  } else if constexpr (std::same_as<T, at::Generator>) {
    return generator_part(object);
  } else if constexpr (IsEngine<T>) {
    return engine_part([&object](std::ostream& output) { output << object; },
                       [&object](std::istream& input) {
                         T read;
                         if (input >> read) object = read;
                       });
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
        [&object](torch::serialize::InputArchive& archive) { archive >> object; },
        [&object] {
          if constexpr (requires { differs_by_rank(object); }) return differs_by_rank(object);
          return false;
        });
  }
}

/// Makes a part of two callables: the value that `save` returns is stored, and given to `load`.
template <class Save, class Load>
PartPointer part_of_callables(Save save, Load load) {
  using Value = std::decay_t<std::invoke_result_t<Save&>>;
  static_assert(std::invocable<Load&, Value>,
                "mezzo::TrainingState::add: load does not take what save returns; let save() "
                "return a number, string, tensor or vector of integers, and load take it");
  const auto value = std::make_shared<Value>();
  PartPointer part = part_of(*value);
  return callable_part(
      std::move(part), [value, save]() mutable { *value = save(); },
      [value, load]() mutable { load(std::exchange(*value, Value())); });
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
