/// \file
/// Amp's state: one entry a loss, in Apex's form and in GradScaler's.
#pragma once

#include <mezzo/levels/initialize.h>

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline std::string loss_scaler_key(std::size_t loss) {
  return "loss_scaler" + std::to_string(loss);
}

/// An entry as GradScaler takes it: the values of `present` where the entry, as one of Apex's, has
/// only the two that Apex writes.
inline GradScaler::StateDict full_scaler_state(const std::string& key,
                                               const GradScaler::StateDict& entry,
                                               GradScaler::StateDict present) {
  for (const char* name : {"loss_scale", "unskipped"}) {
    TORCH_CHECK(entry.count(name) == 1, "load_state_dict: ", key, " lacks \"", name,
                "\"; it should be what Amp::state_dict or Apex's amp.state_dict returned");
  }
  for (const auto& [name, value] : entry) present[name] = value;
  present["scale"] = entry.at("loss_scale");
  present["_growth_tracker"] = entry.at("unskipped");
  present.erase("loss_scale");
  present.erase("unskipped");
  return present;
}

}  // namespace detail

inline bool Amp::is_between_iterations() const {
  return std::none_of(passes_.begin(), passes_.end(),
                      [](const auto& passes) { return passes.awaits_step(); });
}

inline Amp::StateDict Amp::state_dict() const {
  TORCH_CHECK(is_between_iterations(),
              "state_dict: a loss was scaled for an optimizer that has not stepped yet; call it "
              "after amp.step, or amp.zero_grad to give the gradients up");
  StateDict all;
  if (!enabled_) return all;
  for (std::size_t i = 0; i < scalers_.size(); ++i) {
    GradScaler::StateDict entry = scalers_[i].state_dict();
    entry["loss_scale"] = entry.at("scale");
    entry["unskipped"] = entry.at("_growth_tracker");
    all[detail::loss_scaler_key(i)] = std::move(entry);
  }
  return all;
}

inline void Amp::load_state_dict(const StateDict& state) {
  if (!enabled_) return;
  TORCH_CHECK(is_between_iterations(),
              "load_state_dict: a loss was scaled for an optimizer that has not stepped yet; call "
              "it after amp.step, or amp.zero_grad to give the gradients up");
  TORCH_CHECK(state.size() == scalers_.size(), "load_state_dict: state_dict contains ",
              state.size(), " entries, while ", scalers_.size(),
              " loss_scalers are used; give mezzo::initialize the num_losses that was saved");
  std::vector<GradScaler> loaded;
  for (std::size_t i = 0; i < scalers_.size(); ++i) {
    const std::string key = detail::loss_scaler_key(i);
    const auto entry = state.find(key);
    TORCH_CHECK(entry != state.end(), "load_state_dict: state_dict lacks \"", key, "\"");
    GradScaler trial(GradScalerOptions(scalers_[i].rule()));
    trial.load_state_dict(detail::full_scaler_state(key, entry->second, scalers_[i].state_dict()));
    loaded.push_back(std::move(trial));
  }
  for (std::size_t i = 0; i < scalers_.size(); ++i) {
    scalers_[i].load_state_dict(loaded[i].state_dict());
  }
}

template <class Archive>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const Amp& amp) {
  for (const auto& [key, entry] : amp.state_dict()) {
    Archive nested(archive.compilation_unit());
    for (const auto& [name, value] : entry) nested.write(name, c10::IValue(value));
    archive.write(key, nested);
  }
  return archive;
}

template <class Archive>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(Archive& archive,
                                                                                   Amp& amp) {
  Amp::StateDict state;
  for (const std::string& key : archive.keys()) {
    Archive nested;
    if (!archive.try_read(key, nested)) continue;
    for (const std::string& name : nested.keys()) {
      c10::IValue value;
      if (nested.try_read(name, value) && value.isDouble()) state[key][name] = value.toDouble();
    }
  }
  amp.load_state_dict(state);
  return archive;
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
