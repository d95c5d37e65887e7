#pragma once

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
#include <exception>
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

// The objects of a training state, and how each is made by its type. What does not depend on the
// type is compiled with checkpoint_impl.h.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the message of the exception that is being handled.
inline std::string current_exception_message() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of a type of its own";
  }
}

/// Returns what Python calls the type of `value`, for errors.
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

/// The names of the parameters of a state's modules: "model.0.weight"; of several, the first.
using ParameterFqns = std::unordered_map<const c10::TensorImpl*, std::string>;

/// One object of a training state. A value is a number, a string, a tensor, or lists and dicts of
/// them: what Python reads.
struct Stateful {
  using Apply = std::function<void()>;

  /// Returns the object's value, with the object's own tensors, not copies of them. May call
  /// collectives (ShardedOptimizer).
  std::function<c10::IValue(const ParameterFqns& names)> save;
  /// Checks a value, and returns a function that gives it to the object. Does not change the object
  /// itself. The tensors of a value are views of the file.
  std::function<Apply(const c10::IValue& value, const ParameterFqns& names)> load;
  /// Returns the parameters of a module with their names; null for other objects.
  std::function<TensorsByName()> parameters = nullptr;
  /// Returns the tensors of a module under the names of its state_dict; null for other objects.
  std::function<TensorsByName()> state_dict = nullptr;
  /// Whether the object goes through torch's archives, as a schedule does. Such an object is loaded
  /// after others: loading an optimizer replaces the learning rates that its schedule has set.
  bool is_archive = false;
};

struct CheckpointEntry {
  std::string name;
  Stateful stateful;
  bool is_per_rank = false;  ///< each rank has its own
};

inline ParameterFqns get_parameter_fqns(const std::vector<CheckpointEntry>& entries) {
  ParameterFqns names;
  for (const CheckpointEntry& one : entries) {
    if (!one.stateful.parameters) continue;
    for (const auto& [name, parameter] : one.stateful.parameters()) {
      std::string whole = one.name + "." + name;
      std::string& known = names.try_emplace(parameter.unsafeGetTensorImpl(), whole).first->second;
      known = std::min(known, whole);
    }
  }
  return names;
}

using PythonDict = c10::impl::GenericDict;

inline PythonDict make_dict() { return PythonDict(c10::AnyType::get(), c10::AnyType::get()); }
inline c10::impl::GenericList make_list() { return c10::impl::GenericList(c10::AnyType::get()); }

/// Returns the value under `key`, None where `dict` is no dict or has no such key.
inline c10::IValue get_item(const c10::IValue& dict, const c10::IValue& key) {
  if (!dict.isGenericDict()) return {};
  const auto items = dict.toGenericDict();
  const auto found = items.find(key);
  return found == items.end() ? c10::IValue() : found->value();
}

// Defined in object_parts.h.
Stateful make_stateful_module(const std::function<std::shared_ptr<torch::nn::Module>()>& find);
Stateful make_stateful_optimizer(const std::function<OptimizerRef()>& find);
Stateful make_stateful_archive(const std::function<void(torch::serialize::OutputArchive&)>& put,
                               const std::function<void(torch::serialize::InputArchive&)>& take,
                               const std::function<void(torch::serialize::InputArchive&)>& check);
Stateful make_stateful_tensor(at::Tensor& tensor);
Stateful make_stateful_tensors(std::vector<at::Tensor>& tensors);
Stateful make_stateful_generator(at::Generator& generator);
Stateful make_stateful_rng();

template <class T>
concept OptimizerRefConvertible = std::convertible_to<T&, OptimizerRef>;
/// A pointer to an optimizer, of any kind.
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

/// A random engine of the standard library, such as std::mt19937, with stream operators.
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

/// Named numbers, such as a GradScaler::StateDict.
template <class T>
concept NumericMap = std::same_as<T, std::map<std::string, double>>;

inline void check_value(bool is_right, const c10::IValue& value, const char* wanted) {
  TORCH_CHECK(is_right, "it is ", describe_type(value), " in the file, and ", wanted, " here");
}

/// Numbers and the like, which a file holds as they are.
template <class T>
concept PlainValue = std::integral<T> || std::floating_point<T> || std::same_as<T, std::string> ||
    RandomEngine<T> || IsNumericVector<T>::value || NumericMap<T>;

/// The type in which a file stores an integer or a real number.
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
                " is beyond std::int64_t; save it as a string, or in two parts");
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
  } else {  // as a tensor, for it may be as long as a data set
    using Wide = StoredNumber<typename T::value_type>;
    std::vector<Wide> all;
    for (const auto value : object) all.push_back(to_ivalue(value).template to<Wide>());
    return at::tensor(all, c10::CppTypeToScalarType<Wide>::value);
  }
}

/// Returns the value of an object of type T. \throws c10::Error if it is another type's
template <PlainValue T>
T from_ivalue(const c10::IValue& value) {
  if constexpr (std::same_as<T, bool>) {
    check_value(value.isBool(), value, "a bool");
    return value.toBool();
  } else if constexpr (std::same_as<T, std::string>) {
    check_value(value.isString(), value, "a string");
    return value.toStringRef();
  } else if constexpr (std::integral<T>) {
    check_value(value.isInt(), value, "an integer");
    TORCH_CHECK(is_representable<T>(value.toInt()), "the file has the integer ", value.toInt(),
                ", which the variable's type cannot hold; load it into a std::int64_t");
    return static_cast<T>(value.toInt());
  } else if constexpr (std::floating_point<T>) {
    check_value(value.isDouble() || value.isInt(), value, "a real number");
    const double number = value.toScalar().toDouble();
    TORCH_CHECK(is_nonfinite(number) ||
                    std::abs(number) <= static_cast<double>(std::numeric_limits<T>::max()),
                "the file has the real number ", number,
                ", which the variable's type cannot hold; load it into a double");
    return static_cast<T>(number);
  } else if constexpr (RandomEngine<T>) {
    check_value(value.isString(), value, "an engine's text");
    T engine;
    std::istringstream stream(value.toStringRef());
    stream.imbue(std::locale::classic());
    stream >> engine;
    TORCH_CHECK(stream && engine_to_string(engine) == value.toStringRef(),
                "the file has the state of another engine; add one of the type that was saved");
    return engine;
  } else if constexpr (NumericMap<T>) {
    check_value(value.isGenericDict(), value, "a dict of numbers");
    T numbers;
    for (const auto& entry : value.toGenericDict()) {
      check_value(entry.key().isString(), entry.key(), "a name");
      numbers[entry.key().toStringRef()] = from_ivalue<double>(entry.value());
    }
    return numbers;
  } else {
    using Wide = StoredNumber<typename T::value_type>;
    const bool fits = value.isTensor() && value.toTensor().layout() == at::kStrided &&
                      value.toTensor().scalar_type() == c10::CppTypeToScalarType<Wide>::value;
    check_value(fits, value,
                std::integral<typename T::value_type> ? "a vector of integers"
                                                      : "a vector of real numbers");
    const at::Tensor read = value.toTensor().contiguous();
    const auto* const begin = read.const_data_ptr<Wide>();
    T all;
    for (std::int64_t i = 0; i < read.numel(); ++i) {
      all.push_back(from_ivalue<typename T::value_type>(begin[i]));
    }
    return all;
  }
}

template <class T>
Stateful make_stateful(T& object) {
  static_assert(!std::is_const_v<T>,
                "mezzo::TrainingState::add: the object is const, and loading a checkpoint changes "
                "it; add one that is not const");
  if constexpr (ModelHandle<T> || ModuleVariable<T>) {
    return make_stateful_module([&object] { return module_pointer(object); });
  } else if constexpr (OptimizerRefConvertible<T>) {
    return make_stateful_optimizer([&object] { return OptimizerRef(object); });
  } else if constexpr (OptimizerRefPointer<T>) {
    return make_stateful_optimizer([&object] {
      TORCH_CHECK(object != nullptr,
                  "TrainingState::add: the pointer to an optimizer is null; construct the "
                  "optimizer before it is added");
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
                  return [&object, ready = std::make_shared<T>(from_ivalue<T>(value))] {
                    object = std::move(*ready);
                  };
                }};
  } else {
    static_assert(
        ArchiveSerializable<T>,
        "mezzo::TrainingState::add: torch::save and torch::load cannot take this type; add "
        "modules, optimizers, tensors, numbers, vectors of numbers, strings and generators, give "
        "two callables that save and load one of these (add(name, save, load)), or give the type "
        "operator<< and operator>> for torch::serialize archives, and include its header and "
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

/// Makes a part of two callables: the value that `save` returns is stored, and given to `load`.
template <class Save, class Load>
Stateful make_stateful_from_callables(Save save, Load load) {
  using Value = std::decay_t<std::invoke_result_t<Save&>>;
  static_assert(std::invocable<Load&, Value>,
                "mezzo::TrainingState::add: load does not take what save returns; let save() "
                "return a number, string, tensor or vector of numbers, and load take it");
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
