#pragma once

#include <mezzo/base/script_module.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/archive_value.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/optimizer_identity.h>
#include <mezzo/optim/detail/averaged_parameters.h>
#include <mezzo/optim/optimizer_interface.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// What goes through an archive of libtorch's: modules, optimizers, and whatever else has the
// operators that torch::save and torch::load ask for.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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

/// Averages are no training weights: see averaged_parameters.h.
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
    const auto archive = std::make_shared<torch::serialize::InputArchive>(archive_of(saved));
    return [this, archive] { take(*archive); };
  }

 protected:
  virtual void put(torch::serialize::OutputArchive& archive) const = 0;
  virtual void take(torch::serialize::InputArchive& archive) const = 0;
};

template <class T>
class ObjectPart final : public ArchivePart {
 public:
  explicit ObjectPart(T& object) : object_(object) {}
  const char* kind() const override { return "object"; }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    archive << std::as_const(object_);
  }
  void take(torch::serialize::InputArchive& archive) const override { archive >> object_; }

 private:
  T& object_;
};

class OptimizerPart final : public ArchivePart {
 public:
  explicit OptimizerPart(AnyOptimizer optimizer) : optimizer_(optimizer) {}
  const char* kind() const override { return "optimizer"; }
  std::string identity(const std::vector<NamedPart>& parts) const override {
    return optimizer_identity(optimizer_, parts);
  }

  /// A split master is the parameter and the rest of it: an average with that rest would be none.
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
    optimizer_.optimizer()
        .state()
        .clear();  // of what the file has no state there is none; load would keep it
    optimizer_.load(archive);
  }

 private:
  AnyOptimizer optimizer_;
};

/// What libtorch writes from a module, but cannot read into one: anything but dense memory as it
/// lies.
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

/// A module, or what holds one: the module that it holds when a checkpoint is saved or loaded.
///
/// libtorch's own loading takes tensors of any shape and dtype, and leaves out what it does not
/// know: `layout` sees to it that there are none such.
template <class Owner>
class ModulePart final : public ArchivePart {
 public:
  explicit ModulePart(Owner& owner) : owner_(owner) { module(); }
  const char* kind() const override { return "module"; }

  std::string layout() const override {
    std::ostringstream lines;
    for_each_tensor([&lines](const char* what, const std::string& name, const at::Tensor& tensor) {
      lines << what << ' ' << name << ": " << tensor.scalar_type() << ' ' << tensor.sizes() << '\n';
    });
    return lines.str();
  }

  void each_parameter(const VisitParameter& visit) const override {
    for (const auto& item : module()->named_parameters()) visit(item.key(), item.value());
  }

  /// Loading gives tensors other memory and leaves their own alone, which so can come back: what
  /// else knows it (the rest of a split master, views, CUDA graphs) is right again. A module that
  /// loads in its own way may write where it is, and does so again when it is put back.
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
    module()->save(archive);
  }
  void take(torch::serialize::InputArchive& archive) const override { module()->load(archive); }

 private:
  auto module() const {
    if constexpr (IsModule<Owner>) {
      return &owner_;
    } else if constexpr (IsScript<Owner>) {
      return std::make_shared<ScriptModuleImpl>(owner_);
    } else {
      TORCH_CHECK(static_cast<bool>(owner_),
                  "TrainingState::add: the module holder is empty; construct the module before it "
                  "is added");
      return &*owner_;
    }
  }

  template <class F>
  void for_each_tensor(const F& visit) const {
    const auto owned = module();
    const auto all = [&visit](const char* what, const auto& tensors) {
      for (const auto& item : tensors) {
        if (item.value().defined()) visit(what, item.key(), item.value());
      }
    };
    all("parameter", owned->named_parameters());
    all("buffer", owned->named_buffers());
  }

  Owner& owner_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
