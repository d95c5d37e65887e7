#pragma once

#include <mezzo/detail/checkpoint/archive_stream.h>
#include <mezzo/detail/checkpoint/checkpoint_part.h>
#include <mezzo/version.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
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

/// libtorch's own loading takes tensors of any shape and dtype, and leaves out what it does not
/// know: `layout` sees to it that there are none such.
template <IsModule Module>
class ModulePart final : public ArchivePart {
 public:
  explicit ModulePart(Module& module) : module_(module) {}
  const char* kind() const override { return "module"; }

  std::string layout() const override {
    std::ostringstream lines;
    const auto list = [&lines](const char* what, const auto& tensors) {
      for (const auto& item : tensors) {
        if (!item.value().defined()) continue;
        lines << what << item.key() << ": " << item.value().scalar_type() << ' '
              << item.value().sizes() << '\n';
      }
    };
    list("parameter ", module_.named_parameters());
    list("buffer ", module_.named_buffers());
    return lines.str();
  }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override { module_.save(archive); }
  void take(torch::serialize::InputArchive& archive) const override { module_.load(archive); }

 private:
  Module& module_;
};

class OptimizerPart final : public ArchivePart {
 public:
  explicit OptimizerPart(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  const char* kind() const override { return "optimizer"; }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override { optimizer_.save(archive); }
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
    return [this, handle = tensor_, memory = tensor_.variable_data()] {
      tensor_ = handle;
      tensor_.set_data(memory);
    };
  }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    TORCH_CHECK(tensor_.defined(), "the tensor is undefined; give it a value before saving");
    const at::Tensor tensor = tensor_.detach();
    const bool is_whole =
        tensor.layout() != at::kStrided || tensor.storage().nbytes() == tensor.nbytes();
    archive.write("0", is_whole ? tensor : tensor.clone(), /*is_buffer=*/true);
  }
  void take(torch::serialize::InputArchive& archive) const override {
    archive.read("0", tensor_, /*is_buffer=*/true);
  }

 private:
  at::Tensor& tensor_;
};

inline at::Tensor state_of(at::Generator generator) {
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

inline void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(state.cpu());
}

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
    set_state(generator_, state);
  }

 private:
  at::Generator& generator_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
