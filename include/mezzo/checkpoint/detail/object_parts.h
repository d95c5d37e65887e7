#pragma once

#include <mezzo/base/detail/default_generators.h>
#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/archive_stream.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/checkpoint/detail/sha256.h>
#include <mezzo/optim/detail/averaged_parameters.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// What goes through an archive of libtorch's: optimizers, tensors, generators, modules
// (module_part.h), and whatever else has the operators that torch::save and torch::load ask for.
namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

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
              " holds an average, for an EmaScope is alive; let it end first (to export the "
              "averages, torch::save the model)");
}

/// A part whose bytes are an archive.
class ArchivePart : public CheckpointPart {
 public:
  void write(const ByteSink& sink) const final { collect()(sink); }

  /// An archive holds tensors, not copies of them.
  std::function<void(const ByteSink& sink)> collect() const final {
    const c10::NoGradGuard no_grad;
    const auto archive = std::make_shared<torch::serialize::OutputArchive>();
    put(*archive);
    return [archive](const ByteSink& sink) {
      const c10::NoGradGuard still_no_grad;
      write_archive(*archive, sink);
    };
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

class OptimizerPart final : public ArchivePart {
 public:
  explicit OptimizerPart(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  const char* kind() const override { return "optimizer"; }

  /// A split master is the parameter and the rest of it: an average with that rest would be none.
  void check_savable() const override {
    for (const auto& group : optimizer_.param_groups()) {
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

/// Tensors whose memory is others' too, as what GradAllReduce::residuals gives: it is kept, and
/// what is read copied there.
class TensorsPart final : public ArchivePart {
 public:
  explicit TensorsPart(std::vector<at::Tensor>& tensors) : tensors_(tensors) {}
  const char* kind() const override { return "tensors"; }

  std::string layout() const override {
    std::ostringstream lines;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      TORCH_CHECK(tensors_[i].defined(), "tensor ", i, " is undefined");
      lines << "tensor " << i << ": " << tensors_[i].scalar_type() << ' ' << tensors_[i].sizes()
            << '\n';
    }
    return lines.str();
  }

 protected:
  void put(torch::serialize::OutputArchive& archive) const override {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor tensor = tensors_[i].detach();
      const bool is_whole = tensor.storage().nbytes() == tensor.nbytes();
      archive.write(std::to_string(i), is_whole ? tensor : tensor.clone(), /*is_buffer=*/true);
    }
  }
  void take(torch::serialize::InputArchive& archive) const override {
    std::vector<at::Tensor> read(tensors_.size());
    for (std::size_t i = 0; i < read.size(); ++i) {
      archive.read(std::to_string(i), read[i], /*is_buffer=*/true);
    }
    for (std::size_t i = 0; i < read.size(); ++i) tensors_[i].copy_(read[i]);
  }

 private:
  std::vector<at::Tensor>& tensors_;
};

class GeneratorPart final : public ArchivePart {
 public:
  explicit GeneratorPart(at::Generator& generator) : generator_(generator) {}
  const char* kind() const override { return "generator"; }
  std::string value_in_common() const override {
    if (!generator_.defined()) return "undefined";
    const at::Tensor state = state_of(generator_);
    return digest_text(state.const_data_ptr(), state.nbytes());
  }

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
