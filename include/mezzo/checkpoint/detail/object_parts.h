#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/archive_value.h>
#include <mezzo/checkpoint/detail/checkpoint_file.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/optimizer_identity.h>
#include <mezzo/checkpoint/detail/part_of.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/detail/step_words.h>
#include <mezzo/optim/fused_options.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

// Parts that are saved through a libtorch archive: modules, optimizers, and other types with the
// operators that torch::save and torch::load require.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Throws for a parameter that holds an average in place of its weight: see averaged_parameters.h.
inline void check_not_averaged(const std::string& what, const at::Tensor& tensor) {
  TORCH_CHECK(!averaged_parameters().hold(tensor), what,
              " holds an average, for an EmaScope is alive; let it end first (to export the "
              "averages, torch::save the model)");
}

/// A part that writes itself into an archive, and reads itself from one.
class ArchivePart : public CheckpointPart {
 public:
  SavedValue save() const final {
    const c10::NoGradGuard no_grad;
    torch::serialize::OutputArchive archive;
    put(archive);
    return value_of(archive);
  }

  std::function<void()> load(SavedValue saved) const final {
    check(saved);
    const auto archive = std::make_shared<torch::serialize::InputArchive>(archive_of(saved));
    return [this, archive] { take(*archive); };
  }

 protected:
  virtual void check(const SavedValue& saved) const { (void)saved; }
  virtual void put(torch::serialize::OutputArchive& archive) const = 0;
  virtual void take(torch::serialize::InputArchive& archive) const = 0;
};

/// An object of any type that torch::save and torch::load accept.
class ObjectPart final : public ArchivePart {
 public:
  ObjectPart(std::function<void(torch::serialize::OutputArchive&)> put,
             std::function<void(torch::serialize::InputArchive&)> take,
             std::function<bool()> differs_by_rank)
      : put_(std::move(put)), take_(std::move(take)), differs_(std::move(differs_by_rank)) {}
  const char* kind() const override { return "object"; }
  std::string value_in_common() const override { return differs_() ? "" : crc_of(save()); }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override { put_(archive); }
  void take(torch::serialize::InputArchive& archive) const override { take_(archive); }

 private:
  std::function<void(torch::serialize::OutputArchive&)> put_;
  std::function<void(torch::serialize::InputArchive&)> take_;
  std::function<bool()> differs_;
};

class OptimizerPart final : public ArchivePart {
 public:
  explicit OptimizerPart(AnyOptimizer optimizer) : optimizer_(optimizer) {}
  const char* kind() const override { return "optimizer"; }
  std::string identity(const std::vector<NamedPart>& parts) const override {
    return optimizer_identity(optimizer_, parts);
  }

  /// The options and the number of steps, and a checksum of a state that is not shared out.
  std::string value_in_common() const override {
    std::string words = words_of_step(optimizer_, /*scale=*/{});
    const bool is_sharded = optimizer_.mezzos() != nullptr && optimizer_.mezzos()->is_sharded();
    return is_sharded ? words : words + "state " + crc_of(save());
  }

  /// A file omits values of ExtraOptions that are the defaults, and loading it does not reset them.
  /// The undo therefore sets them before it loads the file. A load may also have replaced a group's
  /// options by others of mezzo's class.
  std::function<void()> snapshot() const override {
    std::vector<std::shared_ptr<torch::optim::OptimizerOptions>> options;
    for (const auto& group : optimizer_.optimizer().param_groups()) {
      options.emplace_back(group.options().clone());
    }
    return [groups = &optimizer_.optimizer().param_groups(), options,
            put_back = ArchivePart::snapshot()] {
      for (std::size_t i = 0; i < options.size(); ++i) {
        const auto* const before = dynamic_cast<const HoldsExtraOptions*>(options[i].get());
        auto* const now = dynamic_cast<HoldsExtraOptions*>(&(*groups)[i].options());
        if (before == nullptr && now != nullptr) {
          (*groups)[i].set_options(options[i]->clone());
        } else if (now != nullptr) {
          now->set_extras(before->extras());
        }
      }
      put_back();
    };
  }

  /// A split master is the parameter together with its lower bits. With an average in place of the
  /// parameter, the two do not belong together.
  void check_savable() const override {
    for (const auto& group : optimizer_.optimizer().param_groups()) {
      for (const at::Tensor& parameter : group.params())
        check_not_averaged("a parameter", parameter);
    }
  }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    check_savable();
    optimizer_.save(archive);
  }
  void take(torch::serialize::InputArchive& archive) const override {
    optimizer_.optimizer().state().clear();  // otherwise load keeps states that the file lacks
    optimizer_.load(archive);
  }

 private:
  AnyOptimizer optimizer_;
};

/// Refuses tensors that libtorch saves from a module but cannot load: all that are not dense.
inline void check_module_tensor(const std::string& what, const at::Tensor& tensor) {
  check_not_averaged(what, tensor);
  TORCH_CHECK(
      tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_conj() &&
          !tensor.is_neg(),
      what,
      " is sparse, quantized, or a conjugate or negative view, which libtorch cannot "
      "load into a module; register a dense tensor (resolve_conj(), resolve_neg()), or keep "
      "it beside the module and add it to the state by itself");
}

/// A module, or the module that a holder has when a checkpoint is saved or loaded.
///
/// libtorch's own loading accepts tensors of any shape and dtype, and ignores unknown names.
/// Comparing `layout` rules both out.
class ModulePart final : public ArchivePart {
 public:
  /// `module` returns the present module, or throws.
  explicit ModulePart(std::function<std::shared_ptr<torch::nn::Module>()> module)
      : module_(std::move(module)) {
    module_();
  }
  const char* kind() const override { return "module"; }

  std::string layout() const override {
    std::ostringstream lines;
    for_each_tensor([&lines](const char* what, const std::string& name, const at::Tensor& tensor) {
      lines << what << ' ' << name << ": " << tensor.scalar_type() << ' ' << tensor.sizes() << '\n';
    });
    return lines.str();
  }

  /// Of the parameters alone: each rank's forward passes change its buffers.
  std::string value_in_common() const override {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& item : module_()->named_parameters()) {
      check_module_tensor("parameter \"" + item.key() + '"', item.value());
      list.push_back(savable(item.value()));
    }
    return "parameters " + crc_of({c10::IValue(list)});
  }

  void each_parameter(const VisitParameter& visit) const override {
    for (const auto& item : module_()->named_parameters()) visit(item.key(), item.value());
  }

  /// Loading gives tensors new memory and leaves their old memory alone, so restoring puts the old
  /// memory back. Split masters, views and CUDA graphs that refer to it are then valid again. A
  /// module with a `load` of its own may write in place, and does so again when it is restored.
  std::function<void()> snapshot() const override {
    std::vector<std::pair<at::Tensor, at::Tensor>> memories;
    for_each_tensor([&memories](const char*, const std::string&, const at::Tensor& tensor) {
      memories.emplace_back(tensor, tensor.variable_data());
    });
    return [memories, put_back = ArchivePart::snapshot()] {
      put_back();
      for (const auto& [tensor, memory] : memories) {
        if (!tensor.is_alias_of(memory)) tensor.set_data(memory);
      }
    };
  }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    for_each_tensor([](const char* what, const std::string& name, const at::Tensor& tensor) {
      check_module_tensor(std::string(what) + " \"" + name + "\"", tensor);
    });
    module_()->save(archive);
  }
  void take(torch::serialize::InputArchive& archive) const override { module_()->load(archive); }

  /// \throws c10::Error where the file has two values for a parameter that this module has under
  ///   two names: the value that is read last would be taken for both
  void check(const SavedValue& saved) const override {
    std::unordered_map<const c10::TensorImpl*, std::pair<std::string, std::string>> seen;
    for_each_tensor([&](const char*, const std::string& name, const at::Tensor& tensor) {
      const at::Tensor read = tensor_at(saved.value, name);
      if (!read.defined()) return;
      auto& [first, crc] = seen[tensor.unsafeGetTensorImpl()];
      if (first.empty()) {
        first = name;
        return;
      }
      if (crc.empty()) crc = crc_of({c10::IValue(savable(tensor_at(saved.value, first)))});
      TORCH_CHECK(crc == crc_of({c10::IValue(savable(read))}), "the file has one value for \"",
                  first, "\" and another for \"", name,
                  "\", which are one tensor in this model; load it into a model that does not "
                  "tie them, and copy the value that you want");
    });
  }

 private:
  /// Returns the tensor at a name with dots, undefined where the file has none.
  static at::Tensor tensor_at(c10::IValue value, std::string_view name) {
    while (value.isGenericDict()) {
      const auto dict = value.toGenericDict();
      const std::size_t dot = name.find('.');
      const auto found = dict.find(std::string(name.substr(0, dot)));
      if (found == dict.end()) return {};
      value = found->value();
      if (dot == std::string_view::npos) break;
      name.remove_prefix(dot + 1);
    }
    return value.isTensor() ? value.toTensor() : at::Tensor();
  }

  template <class F>
  void for_each_tensor(const F& visit) const {
    const auto owned = module_();
    const auto all = [&visit](const char* what, const auto& tensors) {
      for (const auto& item : tensors) {
        if (item.value().defined()) visit(what, item.key(), item.value());
      }
    };
    all("parameter", owned->named_parameters());
    all("buffer", owned->named_buffers());
  }

  std::function<std::shared_ptr<torch::nn::Module>()> module_;
};

MEZZO_INLINE PartPointer module_part(std::function<std::shared_ptr<torch::nn::Module>()> module) {
  return std::make_shared<ModulePart>(std::move(module));
}

MEZZO_INLINE PartPointer optimizer_part(AnyOptimizer optimizer) {
  return std::make_shared<OptimizerPart>(optimizer);
}

MEZZO_INLINE PartPointer archive_part(std::function<void(torch::serialize::OutputArchive&)> put,
                                      std::function<void(torch::serialize::InputArchive&)> take,
                                      std::function<bool()> differs_by_rank) {
  return std::make_shared<ObjectPart>(std::move(put), std::move(take), std::move(differs_by_rank));
}

MEZZO_INLINE std::shared_ptr<torch::nn::Module> held_module(torch::nn::Module* module) {
  TORCH_CHECK(module != nullptr,
              "TrainingState::add: the module holder is empty; construct the module before it "
              "is added");
  return {std::shared_ptr<void>(), module};
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
