#pragma once

#include <mezzo/base/detail/exception_message.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/model_refs.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/optim/optimizer_ref.h>

#include <ATen/core/Dict.h>
#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <locale>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

// Saving and loading of each supported type. Code that does not depend on the type is in
// object_entries.h and optimizer_entry.h, and compiled with checkpoint_inl.h.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns Python's name for the type of `value`, for error messages.
inline std::string describe_type(const c10::IValue& value) {
  if (value.isTensor()) return "a tensor";
  if (value.isBool()) return "a bool";
  if (value.isInt()) return "an integer";
  if (value.isDouble()) return "a real number";
  if (value.isString()) return "a string";
  if (value.isGenericDict()) return "a dict";
  if (value.isList()) return "a list";
  return "a " + value.tagKind();
}

/// Fully qualified names of the parameters of all modules: "model.0.weight". A parameter with
/// several names has the alphabetically first one.
using ParameterFqns = std::unordered_map<const c10::TensorImpl*, std::string>;

/// Saves and loads one object. Values are numbers, strings, tensors, and lists and dicts of them.
struct Stateful {
  using ApplyFn = std::function<void()>;

  /// Returns the object's value. Tensors are not copied. May call collectives (ShardedOptimizer).
  std::function<c10::IValue(const ParameterFqns& names)> save;
  /// Checks a value without changing the object, and returns a function that loads it. Tensors of
  /// the value alias the file.
  std::function<ApplyFn(const c10::IValue& value, const ParameterFqns& names)> load;
  /// Returns the named parameters of a module; null for other objects.
  std::function<TensorsByName()> parameters = nullptr;
  /// Returns the tensors of a module by their state_dict keys; null for other objects.
  std::function<TensorsByName()> state_dict = nullptr;
  /// Whether the object serializes through torch archives. Such objects are loaded last, because
  /// loading an optimizer overwrites the learning rates that its schedule has set.
  bool is_archive = false;
};

struct CheckpointEntry {
  std::string name;
  Stateful stateful;
  bool is_per_rank = false;
};

inline ParameterFqns get_parameter_fqns(const std::vector<CheckpointEntry>& entries) {
  ParameterFqns names;
  for (const CheckpointEntry& entry : entries) {
    if (!entry.stateful.parameters) continue;
    for (const auto& [name, parameter] : entry.stateful.parameters()) {
      const std::string fqn = entry.name + "." + name;
      std::string& first = names.try_emplace(parameter.unsafeGetTensorImpl(), fqn).first->second;
      first = std::min(first, fqn);
    }
  }
  return names;
}

using PythonDict = c10::impl::GenericDict;

inline PythonDict make_dict() { return PythonDict(c10::AnyType::get(), c10::AnyType::get()); }
inline c10::impl::GenericList make_list() { return c10::impl::GenericList(c10::AnyType::get()); }

/// Returns the value of `key`, or None if `dict` is not a dict or does not have the key.
inline c10::IValue get_item(const c10::IValue& dict, const c10::IValue& key) {
  if (!dict.isGenericDict()) return {};
  const auto items = dict.toGenericDict();
  const auto found = items.find(key);
  return found == items.end() ? c10::IValue() : found->value();
}

// Defined in object_entries.h and optimizer_entry.h.
Stateful make_stateful_module(const std::function<std::shared_ptr<torch::nn::Module>()>& find);
Stateful make_stateful_optimizer(const std::function<OptimizerRef()>& find);
Stateful make_stateful_archive(const std::function<void(torch::serialize::OutputArchive&)>& write,
                               const std::function<void(torch::serialize::InputArchive&)>& read,
                               const std::function<void(torch::serialize::InputArchive&)>& check);
Stateful make_stateful_tensor(at::Tensor& tensor);
Stateful make_stateful_tensors(std::vector<at::Tensor>& tensors);
Stateful make_stateful_generator(at::Generator& generator);
Stateful make_stateful_rng();

template <class T>
concept OptimizerRefConvertible = std::convertible_to<T&, OptimizerRef>;
/// A raw or smart pointer to an optimizer.
template <class T>
concept OptimizerRefPointer = requires(const T& pointer) {
  OptimizerRef(*pointer);
  pointer != nullptr;
};

template <class T>
concept ArchiveSerializable = requires(torch::serialize::OutputArchive& output,
                                       torch::serialize::InputArchive& input, T& object) {
  output << std::as_const(object);
  input >> object;
};

/// A standard library random engine, such as std::mt19937.
template <class T>
concept RandomEngine = std::uniform_random_bit_generator<T> &&
    requires(std::ostream& output, std::istream& input, T& engine) {
  output << std::as_const(engine);
  input >> engine;
};

template <class T>
struct IsNumericVector : std::false_type {};
template <class T>
requires(std::floating_point<T> ||
         (std::integral<T> && !std::same_as<T, bool>)) struct IsNumericVector<std::vector<T>>
    : std::true_type {
};

/// Numbers by name, such as a GradScaler::StateDict.
template <class T>
concept NumericMap = std::same_as<T, std::map<std::string, double>>;

inline void check_type(bool matches, const c10::IValue& value, const char* expected) {
  TORCH_CHECK(matches, "type mismatch: ", describe_type(value), " in the checkpoint, ", expected,
              " in the current state");
}

template <class T>
concept PlainValue = std::integral<T> || std::floating_point<T> || std::same_as<T, std::string> ||
    RandomEngine<T> || IsNumericVector<T>::value || NumericMap<T>;

template <class T>
using StoredNumber = std::conditional_t<std::integral<T>, std::int64_t, double>;

template <RandomEngine T>
std::string engine_to_string(const T& engine) {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  stream << engine;
  return stream.str();
}

template <std::integral To, std::integral From>
constexpr bool is_representable(From number) {
  const To to = static_cast<To>(number);
  return static_cast<From>(to) == number && (to < To{}) == (number < From{});
}

template <PlainValue T>
c10::IValue to_ivalue(const T& object) {
  if constexpr (std::same_as<T, bool> || std::same_as<T, std::string>) {
    return object;
  } else if constexpr (std::integral<T>) {
    TORCH_CHECK(is_representable<std::int64_t>(object), "the integer ", object,
                " does not fit in std::int64_t; save it as a string, or as two integers");
    return static_cast<std::int64_t>(object);
  } else if constexpr (std::floating_point<T>) {
    static_assert(sizeof(T) <= sizeof(double));
    return static_cast<double>(object);
  } else if constexpr (RandomEngine<T>) {
    return engine_to_string(object);
  } else if constexpr (NumericMap<T>) {
    PythonDict numbers = make_dict();
    for (const auto& [name, number] : object) numbers.insert(name, number);
    return numbers;
  } else {  // as a tensor, because it may have an element for each sample
    using Wide = StoredNumber<typename T::value_type>;
    std::vector<Wide> numbers;
    for (const auto value : object) numbers.push_back(to_ivalue(value).template to<Wide>());
    return at::tensor(numbers, c10::CppTypeToScalarType<Wide>::value);
  }
}

/// Converts a stored value to T. \throws c10::Error for a value of another type
template <PlainValue T>
T from_ivalue(const c10::IValue& value) {
  if constexpr (std::same_as<T, bool>) {
    check_type(value.isBool(), value, "a bool");
    return value.toBool();
  } else if constexpr (std::same_as<T, std::string>) {
    check_type(value.isString(), value, "a string");
    return value.toStringRef();
  } else if constexpr (std::integral<T>) {
    check_type(value.isInt(), value, "an integer");
    TORCH_CHECK(is_representable<T>(value.toInt()), "the integer ", value.toInt(),
                " in the checkpoint is out of range for the variable; load it into a std::int64_t");
    return static_cast<T>(value.toInt());
  } else if constexpr (std::floating_point<T>) {
    check_type(value.isDouble() || value.isInt(), value, "a real number");
    const double number = value.toScalar().toDouble();
    TORCH_CHECK(is_nonfinite(number) ||
                    std::abs(number) <= static_cast<double>(std::numeric_limits<T>::max()),
                "the real number ", number,
                " in the checkpoint is out of range for the variable; load it into a double");
    return static_cast<T>(number);
  } else if constexpr (RandomEngine<T>) {
    check_type(value.isString(), value, "the state of a random engine");
    T engine;
    std::istringstream stream(value.toStringRef());
    stream.imbue(std::locale::classic());
    stream >> engine;
    TORCH_CHECK(stream && engine_to_string(engine) == value.toStringRef(),
                "the checkpoint has the state of another random engine; add an engine of the saved "
                "type");
    return engine;
  } else if constexpr (NumericMap<T>) {
    check_type(value.isGenericDict(), value, "a dict of numbers");
    T numbers;
    for (const auto& entry : value.toGenericDict()) {
      check_type(entry.key().isString(), entry.key(), "a string");
      numbers[entry.key().toStringRef()] = from_ivalue<double>(entry.value());
    }
    return numbers;
  } else {
    using Wide = StoredNumber<typename T::value_type>;
    const bool matches = value.isTensor() && value.toTensor().layout() == at::kStrided &&
                         value.toTensor().scalar_type() == c10::CppTypeToScalarType<Wide>::value;
    check_type(matches, value,
               std::integral<typename T::value_type> ? "a vector of integers"
                                                     : "a vector of real numbers");
    const at::Tensor saved = value.toTensor().contiguous();
    const auto* const elements = saved.const_data_ptr<Wide>();
    T numbers;
    for (std::int64_t i = 0; i < saved.numel(); ++i) {
      numbers.push_back(from_ivalue<typename T::value_type>(elements[i]));
    }
    return numbers;
  }
}

template <class T>
Stateful make_stateful(T& object) {
  static_assert(!std::is_const_v<T>,
                "mezzo::TrainingState::add: the object is const, but loading a checkpoint modifies "
                "it; add a non-const object");
  if constexpr (ModelHandle<T> || ModuleVariable<T>) {
    return make_stateful_module([&object] { return module_pointer(object); });
  } else if constexpr (OptimizerRefConvertible<T>) {
    return make_stateful_optimizer([&object] { return OptimizerRef(object); });
  } else if constexpr (OptimizerRefPointer<T>) {
    return make_stateful_optimizer([&object] {
      TORCH_CHECK(object != nullptr,
                  "TrainingState::add: the pointer to an optimizer is null; construct the "
                  "optimizer first");
      return OptimizerRef(*object);
    });
  } else if constexpr (std::derived_from<T, at::Tensor>) {
    return make_stateful_tensor(object);
  } else if constexpr (std::same_as<T, std::vector<at::Tensor>>) {
    return make_stateful_tensors(object);
  } else if constexpr (std::same_as<T, at::Generator>) {
    return make_stateful_generator(object);
  } else if constexpr (PlainValue<T>) {
    return {.save = [&object](const ParameterFqns&) { return to_ivalue(object); },
            .load =
                [&object](const c10::IValue& value, const ParameterFqns&) {
                  return [&object, loaded = std::make_shared<T>(from_ivalue<T>(value))] {
                    object = std::move(*loaded);
                  };
                }};
  } else {
    static_assert(
        ArchiveSerializable<T>,
        "mezzo::TrainingState::add: torch::save and torch::load do not accept this type; add "
        "modules, optimizers, tensors, numbers, vectors of numbers, strings and generators, pass "
        "two callables that save and load one of these (add(name, save, load)), or define "
        "operator<< and operator>> for torch::serialize archives, and include their header and "
        "<torch/serialize/archive.h>");
    return make_stateful_archive(
        [&object](torch::serialize::OutputArchive& archive) { archive << std::as_const(object); },
        [&object](torch::serialize::InputArchive& archive) { archive >> object; },
        [&object](torch::serialize::InputArchive& archive) {
          if constexpr (requires { check_archive(archive, std::as_const(object)); }) {
            check_archive(archive, std::as_const(object));
          }
        });
  }
}

/// Stores the value that `save` returns, and passes it to `load`.
template <class Save, class Load>
Stateful make_stateful_from_callables(Save save, Load load) {
  using Value = std::decay_t<std::invoke_result_t<Save&>>;
  static_assert(std::invocable<Load&, Value>,
                "mezzo::TrainingState::add: load is not callable with what save returns; return a "
                "number, string, tensor or vector of numbers from save, and accept it in load");
  const auto value = std::make_shared<Value>();
  const Stateful stateful = make_stateful(*value);
  return {.save =
              [value, save, stateful](const ParameterFqns& names) mutable {
                *value = save();
                return stateful.save(names);
              },
          .load =
              [value, load, stateful](const c10::IValue& saved, const ParameterFqns& names) {
                return [value, load, apply = stateful.load(saved, names)]() mutable {
                  apply();
                  load(std::exchange(*value, Value()));
                };
              }};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
