/// \file
/// What is checked before anything is changed.
#pragma once

#include <mezzo/base/detail/model_list.h>
#include <mezzo/base/version.h>
#include <mezzo/levels/detail/model_cast.h>
#include <mezzo/levels/opt_level.h>
#include <mezzo/optim/detail/gradients.h>
#include <mezzo/optim/detail/trained_once.h>
#include <mezzo/optim/fused_optimizer.h>
#include <mezzo/optim/master_weights.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An optimizer of some other model is a mistake that nothing else would show: it would step
/// parameters that never get a gradient.
inline void check_holds_one_of(const std::unordered_set<const c10::TensorImpl*>& of_models,
                               const torch::optim::Optimizer& optimizer, std::size_t number) {
  bool holds_one = false;
  for_each_parameter(optimizer, [&](std::size_t, const at::Tensor& parameter) {
    holds_one = holds_one || of_models.count(parameter.unsafeGetTensorImpl()) != 0;
  });
  TORCH_CHECK(holds_one, "optimizer ", number,
              " holds no parameter of the models that were given; construct it with their "
              "parameters, or give its model too");
}

/// Adagrad makes its state in the constructor.
inline bool has_stepped(const torch::optim::Optimizer& optimizer) {
  return std::any_of(
      optimizer.state().begin(), optimizer.state().end(), [](const auto& parameter_and_state) {
        const auto* const adagrad =
            dynamic_cast<const torch::optim::AdagradParamState*>(parameter_and_state.second.get());
        return adagrad == nullptr || adagrad->step() != 0;
      });
}

/// That it can be stepped once the models are cast, which cannot be undone.
inline void check_is_ready_to_cast(torch::optim::Optimizer& optimizer, std::size_t number,
                                   bool wants_masters) {
  TORCH_CHECK(!has_stepped(optimizer), "optimizer ", number,
              " has stepped already, in float32, and the level casts the model; call "
              "mezzo::initialize before the first step, and load a saved state afterwards");
  const bool is_mezzos = as_fused(optimizer) != nullptr;
  if (!wants_masters || is_mezzos) return;
  (void)MasterWeights(optimizer);  // refuses what it cannot step
  std::vector<at::Tensor> parameters;
  for_each_parameter(optimizer, [&](std::size_t, const at::Tensor& parameter) {
    parameters.push_back(parameter);
  });
  refuse_duplicates(parameters, "MasterWeights");
}

inline void check_models_and_optimizers(const ModelList& models, const OptimizerList& optimizers,
                                        const OptLevel& level) {
  std::unordered_set<const c10::TensorImpl*> parameters;
  for (const auto& model : models.modules()) {
    check_model(*model);
    for (const at::Tensor& parameter : model->parameters()) {
      parameters.insert(parameter.unsafeGetTensorImpl());
    }
  }
  const bool is_cast = is_low_precision(level.cast_model_type().value_or(at::kFloat));
  for (std::size_t i = 0; i < optimizers.optimizers().size(); ++i) {
    torch::optim::Optimizer& optimizer = *optimizers.optimizers()[i];
    check_holds_one_of(parameters, optimizer, i);
    if (is_cast) check_is_ready_to_cast(optimizer, i, level.master_weights());
  }
}

/// A gradient that belongs to two would be unscaled by each.
inline void refuse_shared_parameters(const OptimizerList& optimizers) {
  if (optimizers.optimizers().size() < 2) return;
  std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> owners;
  for (const auto* optimizer : optimizers.optimizers()) {
    for_each_parameter(*optimizer, [&](std::size_t, const at::Tensor& parameter) {
      const auto known = owners.emplace(parameter.unsafeGetTensorImpl(), optimizer).first;
      TORCH_CHECK(known->second == optimizer,
                  "scale_loss: two of the optimizers hold the same parameter (of the shape ",
                  parameter.sizes(),
                  "), whose gradient both would unscale; give it to one of them, or call "
                  "scale_loss for one of them at a time");
    });
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
