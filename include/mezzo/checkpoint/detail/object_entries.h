#pragma once

#include <mezzo/base/detail/describe.h>
#include <mezzo/base/detail/dtype_names.h>
#include <mezzo/base/detail/rng_state.h>
#include <mezzo/base/tensors_by_name.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/archive_conversion.h>
#include <mezzo/checkpoint/detail/stateful.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Detaches `tensor`, and copies a view, so that only its own elements are saved.
inline at::Tensor detach_for_saving(const at::Tensor& tensor) {
  const at::Tensor detached = tensor.detach();
  const bool is_whole =
      detached.layout() != at::kStrided || detached.storage().nbytes() == detached.nbytes();
  return is_whole ? detached : detached.clone();
}

// --- Modules and vectors of tensors, loaded in place ---------------------------------------------

inline std::string describe_dtype_and_shape(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), " ", tensor.sizes());
}

/// Returns the saved tensors in the order of `current`, after checking keys, dtypes, shapes and
/// layouts.
inline std::vector<at::Tensor> check_state_dict(const c10::IValue& value,
                                                const TensorsByName& current) {
  check_type(value.isGenericDict(), value, "a module's state_dict");
  const auto state_dict = value.toGenericDict();
  std::vector<at::Tensor> tensors;
  std::set<std::string> expected_keys;
  for (const auto& [key, tensor] : current) {
    TORCH_CHECK(state_dict.contains(key), "Missing key(s) in state_dict: \"", key, "\"");
    const c10::IValue saved = state_dict.at(key);
    TORCH_CHECK(saved.isTensor(), "type mismatch for ", key, ": ", describe_type(saved),
                " in the checkpoint, a tensor in the current model");
    const at::Tensor read = saved.toTensor();
    TORCH_CHECK(read.scalar_type() == tensor.scalar_type() && read.sizes() == tensor.sizes(),
                "size mismatch for ", key, ": ", describe_dtype_and_shape(read),
                " in the checkpoint, ", describe_dtype_and_shape(tensor), " in the current model");
    TORCH_CHECK(read.layout() == tensor.layout(), "layout mismatch for ", key, ": ", read.layout(),
                " in the checkpoint, ", tensor.layout(), " in the current model");
    tensors.push_back(read);
    expected_keys.insert(key);
  }
  for (const auto& entry : state_dict) {
    const std::string key =
        entry.key().isString() ? entry.key().toStringRef() : describe_type(entry.key());
    TORCH_CHECK(expected_keys.count(key) > 0, "Unexpected key(s) in state_dict: \"", key, "\"");
  }
  return tensors;
}

/// Saves the tensors that `get_tensors` returns, and loads them in place.
inline Stateful make_stateful_named_tensors(const std::function<TensorsByName()>& get_tensors) {
  return {
      .save =
          [get_tensors](const ParameterFqns&) {
            PythonDict values = make_dict();
            for (const auto& [name, tensor] : get_tensors()) {
              values.insert(name, detach_for_saving(tensor));
            }
            return c10::IValue(values);
          },
      .load = [get_tensors](const c10::IValue& value, const ParameterFqns&) -> Stateful::ApplyFn {
        auto current = get_tensors();
        auto saved = check_state_dict(value, current);
        return [current = std::move(current), saved = std::move(saved)] {
          for (std::size_t i = 0; i < current.size(); ++i) current[i].second.copy_(saved[i]);
        };
      }};
}

/// Saves and loads the module that `find` returns at that time.
MEZZO_INLINE Stateful
make_stateful_module(const std::function<std::shared_ptr<torch::nn::Module>()>& find) {
  const auto module = [find] {
    auto found = find();
    TORCH_CHECK(found != nullptr,
                "TrainingState::add: the module holder is empty; construct the module first");
    return found;
  };
  module();
  Stateful stateful = make_stateful_named_tensors([module] { return get_state_dict(*module()); });
  stateful.parameters = [module] { return module()->named_parameters().pairs(); };
  stateful.state_dict = [module] { return get_state_dict(*module()); };
  return stateful;
}

MEZZO_INLINE Stateful make_stateful_tensors(std::vector<at::Tensor>& tensors) {
  return make_stateful_named_tensors([&tensors] {
    TensorsByName named;
    for (const at::Tensor& tensor : tensors) {
      const std::string name = std::to_string(named.size());
      TORCH_CHECK(tensor.defined(), "tensor ", name, " is undefined; assign a tensor first");
      named.emplace_back(name, tensor);
    }
    return named;
  });
}

// --- Other objects -----------------------------------------------------------------------------

/// Saves and loads an object through torch archives. `check` throws the errors that `read` would.
MEZZO_INLINE Stateful
make_stateful_archive(const std::function<void(torch::serialize::OutputArchive&)>& write,
                      const std::function<void(torch::serialize::InputArchive&)>& read,
                      const std::function<void(torch::serialize::InputArchive&)>& check) {
  return {
      .save =
          [write](const ParameterFqns&) {
            const c10::NoGradGuard no_grad;
            torch::serialize::OutputArchive archive;
            write(archive);
            return to_python_state_dict(archive_to_dict(get_module(archive)));
          },
      .load = [read, check](const c10::IValue& value, const ParameterFqns&) -> Stateful::ApplyFn {
        check_type(value.isGenericDict(), value, "the dict of an object");
        auto archive = dict_to_archive(to_archive_dict(value));
        check(archive);
        return [read, value] {
          auto copy = dict_to_archive(to_archive_dict(copy_to_devices(value)));
          read(copy);
        };
      },
      .is_archive = true};
}

MEZZO_INLINE Stateful make_stateful_tensor(at::Tensor& tensor) {
  return {
      .save =
          [&tensor](const ParameterFqns&) {
            TORCH_CHECK(tensor.defined(), "the tensor is undefined; assign a tensor before saving");
            return c10::IValue(detach_for_saving(tensor));
          },
      .load = [&tensor](const c10::IValue& value, const ParameterFqns&) -> Stateful::ApplyFn {
        check_type(value.isTensor(), value, "a tensor");
        const at::Tensor saved = value.toTensor();
        TORCH_CHECK(!tensor.defined() || (tensor.scalar_type() == saved.scalar_type() &&
                                          tensor.layout() == saved.layout()),
                    "tensor mismatch: ", describe(saved), " in the checkpoint, ", describe(tensor),
                    " in the current state; assign a tensor of the saved dtype and layout, or add "
                    "an undefined torch::Tensor");
        return [&tensor, saved] {
          const c10::Device device = tensor.defined() ? tensor.device() : at::kCPU;
          const at::Tensor copy = copy_to_devices(saved, {}, device).toTensor();
          if (tensor.defined()) {
            tensor.set_data(copy);
          } else {
            tensor = copy;
          }
        };
      }};
}

/// Saves and loads the states of `generators`. If `as_list`, the value is a list, whose length may
/// differ from the current number of generators; otherwise it is the state of the only generator.
inline Stateful make_stateful_generators(
    const std::function<std::vector<at::Generator>()>& generators, bool as_list) {
  return {.save =
              [generators, as_list](const ParameterFqns&) {
                auto states = make_list();
                for (const at::Generator& generator : generators()) {
                  states.push_back(get_rng_state(generator));
                }
                return as_list ? c10::IValue(states) : c10::IValue(states.get(0));
              },
          .load = [generators, as_list](const c10::IValue& value,
                                        const ParameterFqns&) -> Stateful::ApplyFn {
            check_type(value.isList() == as_list, value,
                       as_list ? "a list of RNG states" : "an RNG state");
            std::vector<at::Tensor> states;
            for (const c10::IValue& state : as_list ? value.toListRef() : at::ArrayRef(value)) {
              check_type(state.isTensor() && state.toTensor().scalar_type() == at::kByte, state,
                         "an RNG state");
              states.push_back(state.toTensor().clone());
            }
            const std::vector<at::Generator> current = generators();
            const std::size_t num_loaded = std::min(states.size(), current.size());
            for (std::size_t i = 0; i < num_loaded; ++i) {
              set_rng_state(current[i].clone(), states[i]);  // throws before anything is loaded
            }
            return [states = std::move(states), current, num_loaded] {
              if (states.size() != current.size()) {
                TORCH_WARN("The checkpoint has the RNG states of ", states.size(),
                           " devices (the CPU and CUDA devices), and this process has ",
                           current.size(),
                           ": other devices keep their RNG states, and the run will not be bitwise "
                           "identical to an uninterrupted one.");
              }
              for (std::size_t i = 0; i < num_loaded; ++i) set_rng_state(current[i], states[i]);
            };
          }};
}

MEZZO_INLINE Stateful make_stateful_generator(at::Generator& generator) {
  const auto get_generator = [&generator] {
    TORCH_CHECK(generator.defined(), "the generator is undefined; create it first");
    return std::vector<at::Generator>{generator};
  };
  return make_stateful_generators(get_generator, /*as_list=*/false);
}

MEZZO_INLINE Stateful make_stateful_rng() {
  return make_stateful_generators([] { return default_generators(CudaDevices::all); },
                                  /*as_list=*/true);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
