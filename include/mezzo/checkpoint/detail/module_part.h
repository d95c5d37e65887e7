#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/object_parts.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

// Modules, of which libtorch saves what it cannot load, and loads what is not there.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

template <class T>
concept IsModule = std::derived_from<T, torch::nn::Module>;

/// A torch::nn::ModuleHolder (`torch::nn::Linear`), std::shared_ptr or the like.
template <class T>
concept HoldsModule = requires(T& holder) {
  requires IsModule<std::remove_cvref_t<decltype(*holder)>>;
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
    for (const auto& child : module().named_modules("", /*include_self=*/false)) {
      check_archive_name(child.key());
    }
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

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
