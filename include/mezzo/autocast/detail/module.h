/// \file
/// AutocastModuleImpl's members: one module standing in for another.
#pragma once

#include <mezzo/autocast/autocast_module.h>

#include <memory>
#include <optional>
#include <ostream>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

template <class Impl>
AutocastModuleImpl<Impl>::AutocastModuleImpl(std::shared_ptr<Impl> module,
                                             const AutocastSetting& setting, PolicyRef policy,
                                             WeightCacheRef cache)
    : module_(std::move(module)),
      region_(detail::checked_region(setting, std::move(policy), std::move(cache))) {
  TORCH_CHECK(module_ != nullptr, "module: AutocastModule needs a module; this holder is empty");
  // Before there are children, so that none of them is switched.
  torch::nn::Module::train(module_->is_training());
  adopt_names();
}

// The same tensors and children under the same names: everything that libtorch does to them in
// place, here or there, is seen in both.
template <class Impl>
void AutocastModuleImpl<Impl>::adopt_names() {
  for (const auto& item : module_->named_parameters(/*recurse=*/false)) {
    register_parameter(item.key(), item.value(), item.value().requires_grad());
  }
  for (const auto& item : module_->named_buffers(/*recurse=*/false)) {
    register_buffer(item.key(), item.value());
  }
  for (const auto& item : module_->named_children()) {
    register_module(item.key(), item.value());
  }
}

template <class Impl>
std::shared_ptr<torch::nn::Module> AutocastModuleImpl<Impl>::clone(
    const std::optional<torch::Device>& device) const {
  auto copy = std::dynamic_pointer_cast<Impl>(module_->clone(device));
  const AutocastSetting setting{.device = region_.device,
                                .dtype = region_.dtype,
                                .enabled = region_.enabled,
                                .cache_enabled = region_.cache_enabled};
  return std::make_shared<AutocastModuleImpl>(std::move(copy), setting, region_.policy,
                                              region_.weight_cache);
}

// How a parent's clone() fills the child that the copy's own reset() made.
template <class Impl>
void AutocastModuleImpl<Impl>::clone_(torch::nn::Module& other,
                                      const std::optional<torch::Device>& device) {
  const auto copy = std::dynamic_pointer_cast<AutocastModuleImpl>(other.clone(device));
  TORCH_CHECK(copy != nullptr,
              "clone: the child is an AutocastModule in the copy and was none in "
              "the original; register the same modules in reset()");
  *this = *copy;
}

template <class Impl>
void AutocastModuleImpl<Impl>::train(bool on) {
  torch::nn::Module::train(on);
  module_->train(on);  // last: a module that keeps some children in eval mode has the final word
}

template <class Impl>
void AutocastModuleImpl<Impl>::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  module_->to(device, dtype, non_blocking);
}

template <class Impl>
void AutocastModuleImpl<Impl>::to(torch::Dtype dtype, bool non_blocking) {
  module_->to(dtype, non_blocking);
}

template <class Impl>
void AutocastModuleImpl<Impl>::to(torch::Device device, bool non_blocking) {
  module_->to(device, non_blocking);
}

template <class Impl>
void AutocastModuleImpl<Impl>::pretty_print(std::ostream& stream) const {
  stream << "mezzo::AutocastModule(";
  module_->pretty_print(stream);
  stream << ")";
}

template <class Impl>
bool AutocastModuleImpl<Impl>::_forward_has_default_args() {
  return detail::DefaultArguments::exist(*module_);
}

template <class Impl>
unsigned int AutocastModuleImpl<Impl>::_forward_num_required_args() {
  return detail::DefaultArguments::required(*module_);
}

template <class Impl>
std::vector<torch::nn::AnyValue> AutocastModuleImpl<Impl>::_forward_populate_default_args(
    std::vector<torch::nn::AnyValue>&& arguments) {
  return detail::DefaultArguments::complete(*module_, std::move(arguments));
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
