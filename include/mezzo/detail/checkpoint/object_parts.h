#pragma once

#include <mezzo/detail/checkpoint/archive_stream.h>
#include <mezzo/detail/checkpoint/checkpoint_part.h>
#include <mezzo/detail/ema/averaged_parameters.h>
#include <mezzo/detail/tensors/default_generators.h>
#include <mezzo/version.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

namespace torch::nn {
class Module;
}  // namespace torch::nn

// What goes through an archive of libtorch's: modules, optimizers, tensors, generators, and
// whatever else has the operators that torch::save and torch::load ask for.
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
concept IsOptimizer = std::derived_from<T, torch::optim::Optimizer>;

template <class T>
concept GoesThroughArchives = requires(torch::serialize::OutputArchive& output,
                                       torch::serialize::InputArchive& input, T& object) {
  output << std::as_const(object);
  input >> object;
};

/// Averages are no training weights: see averaged_parameters.h.
inline void check_not_averaged(const std::string& what, const at::Tensor& tensor) {
  TORCH_CHECK(!averaged_parameters().hold(tensor), what,
              " holds an average, for an EmaWeights is alive; let it end first (to export the "
              "averages, torch::save the model)");
}

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

/// `name` as named_parameters gives it, of parts between dots. libtorch's archives are programs,
/// with names in them as they come: from some of them no program can be read.
inline void check_archive_name(const std::string& name) {
  constexpr std::array<std::string_view, 28> kKeywords{
      "def",  "if",    "else",   "elif",   "while", "return",   "is",
      "True", "False", "None",   "and",    "or",    "not",      "global",
      "for",  "in",    "raise",  "assert", "break", "continue", "del",
      "pass", "class", "import", "with",   "as",    "Ellipsis", "NoneType"};
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '.');) {
    const bool is_word = std::find(kKeywords.begin(), kKeywords.end(), part) == kKeywords.end();
    const bool is_quotable = std::all_of(part.begin(), part.end(), [](char c) {
      return static_cast<unsigned char>(c) >= ' ' && c != '"' && c != '\\';
    });
    const bool is_reserved = part.starts_with("__") && part.ends_with("__");
    TORCH_CHECK(
        is_word && is_quotable && !is_reserved, "\"", part, "\" in the name \"", name,
        "\" is a keyword of TorchScript's, stands between __, or has a quotation mark, a "
        "backslash or a control character in it; libtorch writes such names and cannot read "
        "them, so register it by another");
  }
}

/// A part whose bytes are an archive.
class ArchivePart : public CheckpointPart {
 public:
  void write(const ByteSink& sink) const final {
    const c10::NoGradGuard no_grad;
    torch::serialize::OutputArchive archive;
    put(archive);
    write_archive(archive, sink);
  }

  std::function<void()> decode(const ByteSource& source,
                               std::optional<c10::Device> device) const final {
    const auto archive = std::make_shared<torch::serialize::InputArchive>();
    read_archive(*archive, source, device);
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

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    for (const auto& child : module().named_modules("", /*include_self=*/false))
      check_archive_name(child.key());
    for_each_tensor([](const char* what, const std::string& name, const at::Tensor& tensor) {
      check_archive_name(name);
      check_module_tensor(std::string(what) + " \"" + name + "\"", tensor);
    });
    module().save(archive);
  }
  void take(torch::serialize::InputArchive& archive) const override { module().load(archive); }

 private:
  auto& module() const {
    if constexpr (IsModule<Owner>) {
      return owner_;
    } else {
      TORCH_CHECK(static_cast<bool>(owner_),
                  "TrainingState: a holder has no module; make it first");
      return *owner_;
    }
  }

  template <class F>
  void for_each_tensor(const F& visit) const {
    const auto all = [&visit](const char* what, const auto& tensors) {
      for (const auto& item : tensors) {
        if (item.value().defined()) visit(what, item.key(), item.value());
      }
    };
    all("parameter", module().named_parameters());
    all("buffer", module().named_buffers());
  }

  Owner& owner_;
};

class OptimizerPart final : public ArchivePart {
 public:
  explicit OptimizerPart(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  const char* kind() const override { return "optimizer"; }

 protected:
  /// A split master is the parameter and the rest of it: an average with that rest would be none.
  void put(torch::serialize::OutputArchive& archive) const override {
    for (const auto& group : optimizer_.param_groups()) {
      for (const at::Tensor& parameter : group.params())
        check_not_averaged("a parameter", parameter);
    }
    optimizer_.save(archive);
  }
  void take(torch::serialize::InputArchive& archive) const override {
    optimizer_.state().clear();  // of what the file has no state there is none; load would keep it
    optimizer_.load(archive);
  }

 private:
  torch::optim::Optimizer& optimizer_;
};

class TensorPart final : public ArchivePart {
 public:
  explicit TensorPart(at::Tensor& tensor) : tensor_(tensor) {}
  const char* kind() const override { return "tensor"; }

  /// Loading gives a tensor other memory, and leaves its own alone.
  std::function<void()> snapshot() const override {
    if (!tensor_.defined()) return [this] { tensor_ = at::Tensor(); };
    check_not_averaged("the tensor", tensor_);
    return [this, handle = tensor_, memory = tensor_.variable_data()] {
      tensor_ = handle;
      tensor_.set_data(memory);
    };
  }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    TORCH_CHECK(tensor_.defined(), "the tensor is undefined; give it a value before saving");
    check_not_averaged("the tensor", tensor_);
    const at::Tensor tensor = tensor_.detach();
    const bool is_whole =
        tensor.layout() != at::kStrided || tensor.storage().nbytes() == tensor.nbytes();
    archive.write("0", is_whole ? tensor : tensor.clone(), /*is_buffer=*/true);
  }

  /// The archive itself would set another dtype's bytes as this one's, and knows dense memory only.
  void take(torch::serialize::InputArchive& archive) const override {
    at::Tensor read;
    archive.read("0", read, /*is_buffer=*/true);
    if (!tensor_.defined()) {
      tensor_ = read;
      return;
    }
    TORCH_CHECK(tensor_.scalar_type() == read.scalar_type() && tensor_.layout() == read.layout(),
                "it is ", read.scalar_type(), ' ', read.layout(), " in the file, and ",
                tensor_.scalar_type(), ' ', tensor_.layout(), " here");
    tensor_.set_data(read.to(tensor_.device()));
  }

 private:
  at::Tensor& tensor_;
};

class GeneratorPart final : public ArchivePart {
 public:
  explicit GeneratorPart(at::Generator& generator) : generator_(generator) {}
  const char* kind() const override { return "generator"; }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    TORCH_CHECK(generator_.defined(), "the generator is undefined; make it before saving");
    archive.write("0", state_of(generator_), /*is_buffer=*/true);
  }
  void take(torch::serialize::InputArchive& archive) const override {
    TORCH_CHECK(generator_.defined(), "the generator is undefined; make it before loading");
    at::Tensor state;
    archive.read("0", state, /*is_buffer=*/true);
    set_state(generator_, state.cpu());
  }

 private:
  at::Generator& generator_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
