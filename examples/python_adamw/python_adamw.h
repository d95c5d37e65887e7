// The state of Python's torch.optim.AdamW in C++.
#pragma once

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

/// Reads a file of Python's `torch.save(object, path)`: dicts, lists, numbers, strings and tensors.
/// \throws c10::Error if the file cannot be read, or holds objects of Python classes
inline c10::IValue read_python_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.is_open(), path, " cannot be opened");
  return torch::pickle_load({std::istreambuf_iterator<char>(file), {}});
}

/// Returns the value under `key` of a Python dict. \throws c10::Error if there is none
inline c10::IValue python_item(const c10::IValue& dict, const c10::IValue& key) {
  TORCH_CHECK(dict.isGenericDict(), "this is not a dict, and should have ", key);
  const auto items = dict.toGenericDict();
  const auto found = items.find(key);
  TORCH_CHECK(found != items.end(), "this is not an AdamW's state_dict: it lacks ", key);
  return found->value();
}

/// Returns a number that Python keeps as a float, an int or, in a `capturable` optimizer, a tensor.
inline double python_number(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
}

inline torch::optim::AdamWOptions python_adamw_options(const c10::IValue& group) {
  const auto items = group.toGenericDict();
  const auto is_set = [&items](const char* key) {
    const auto found = items.find(key);
    return found != items.end() && found->value().isBool() && found->value().toBool();
  };
  TORCH_CHECK(!items.contains("decoupled_weight_decay") || is_set("decoupled_weight_decay"),
              "this is the state_dict of Adam, and not of AdamW");
  TORCH_CHECK(!is_set("maximize"), "AdamW in C++ does not maximize; negate the loss in Python");
  const auto betas = python_item(group, "betas").toTupleRef().elements();
  return torch::optim::AdamWOptions(python_number(python_item(group, "lr")))
      .betas(std::make_tuple(python_number(betas.at(0)), python_number(betas.at(1))))
      .eps(python_number(python_item(group, "eps")))
      .weight_decay(python_number(python_item(group, "weight_decay")))
      .amsgrad(is_set("amsgrad"));
}

/// Gives `optimizer`, a torch::optim::AdamW or mezzo::optim::AdamW, the moments, step counts and
/// options of `state_dict`, from Python's `torch.optim.AdamW.state_dict()`. Both optimizers must
/// have the same groups of the same parameters in the same order. Load the weights first.
/// \throws c10::Error, and changes nothing, if counts or shapes differ
template <class Optimizer>
void load_python_adamw(Optimizer& optimizer, const c10::IValue& state_dict) {
  const c10::IValue groups = python_item(state_dict, "param_groups");
  const auto& here = optimizer.param_groups();
  TORCH_CHECK(groups.toListRef().size() == here.size(), "Python's optimizer has ",
              groups.toListRef().size(), " groups, and this one ", here.size());
  const auto states = python_item(state_dict, "state").toGenericDict();

  std::vector<torch::optim::OptimizerParamGroup> twin_groups;
  for (std::size_t g = 0; g < here.size(); ++g) {
    const c10::IValue group = groups.toListRef()[g];
    twin_groups.emplace_back(here[g].params(), std::make_unique<torch::optim::AdamWOptions>(
                                                   python_adamw_options(group)));
  }
  torch::optim::AdamW twin(std::move(twin_groups));  // libtorch's own, over the same parameters
  for (std::size_t g = 0; g < here.size(); ++g) {
    const c10::IValue numbers = python_item(groups.toListRef()[g], "params");
    const auto& parameters = here[g].params();
    TORCH_CHECK(numbers.toListRef().size() == parameters.size(), "group ", g, " has ",
                numbers.toListRef().size(), " parameters in Python, and ", parameters.size(),
                " here");
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto found = states.find(numbers.toListRef()[i]);
      if (found == states.end()) continue;  // it had no gradient yet
      const auto moment = [&](const char* key) {
        const torch::Tensor value = python_item(found->value(), key).toTensor();
        TORCH_CHECK(value.sizes() == parameters[i].sizes(), "parameter ", i, " of group ", g,
                    " is ", value.sizes(), " in Python, and ", parameters[i].sizes(), " here");
        return value.to(parameters[i].device());
      };
      auto state = std::make_unique<torch::optim::AdamWParamState>();
      state->step(static_cast<int64_t>(python_number(python_item(found->value(), "step"))));
      state->exp_avg(moment("exp_avg")).exp_avg_sq(moment("exp_avg_sq"));
      const auto& options =
          static_cast<torch::optim::AdamWOptions&>(twin.param_groups()[g].options());
      if (options.amsgrad()) state->max_exp_avg_sq(moment("max_exp_avg_sq"));
      twin.state()[parameters[i].unsafeGetTensorImpl()] = std::move(state);
    }
  }
  std::stringstream file;  // mezzo::optim::AdamW reads torch::optim::AdamW's
  torch::save(twin, file);
  torch::load(optimizer, file);
}
