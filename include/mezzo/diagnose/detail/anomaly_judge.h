/// \file
/// Which op made an inf or NaN, and why.
#pragma once

#include <mezzo/autocast/detail/op_listener.h>
#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/diagnose/anomaly.h>
#include <mezzo/diagnose/detail/value_range.h>
#include <mezzo/diagnose/detail/watched_ops.h>
#include <mezzo/diagnose/overflow_report.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Takes what ops and nodes return, in their order.
///
/// What an op made is found at once. It counts while some memory carries it that no op has read
/// and made finite: 1 / (1 + exp(100)) is 0, and nothing is wrong.
class AnomalyJudge {
 public:
  static constexpr std::size_t kMostTold = 4;
  static constexpr std::size_t kMostCarried = 32;  // then nothing is read any more

  AnomalyJudge(const torch::nn::Module& model, AnomalyTraceOptions options)
      : parameters_(name_parameters(model)), options_(std::move(options)) {
    note_old_gradients(model);
  }

  std::vector<Anomaly> anomalies() const {
    std::vector<Anomaly> told;
    for (const Found& found : found_) {
      if (!found.carriers.empty() && told.size() < kMostTold) told.push_back(found.anomaly);
    }
    return told;
  }
  std::deque<AnomalyFrame> frames() const {
    for (const Found& found : found_) {
      if (!found.carriers.empty()) return found.frames;
    }
    return frames_;
  }
  std::size_t found() const { return found_.size(); }
  bool is_full() const {
    const auto counts = [](const Found& found) { return !found.carriers.empty(); };
    return std::count_if(found_.begin(), found_.end(), counts) >= std::ptrdiff_t{kMostCarried};
  }
  std::string parameter_of(const at::Tensor& tensor) const { return parameters_.name_of(tensor); }

  /// A copy of which all is known that is known of the original.
  at::Tensor copied(const at::Tensor& tensor) {
    at::Tensor copy = tensor.clone();
    if (const Memory* const known = memory_.find(tensor)) memory_.note(copy, *known);
    originals_.note(copy, memory_of(tensor));
    parameters_.note_copy(tensor, copy);
    return copy;
  }

  /// What `op` returned, in this node.
  void take(const OpenOp& op, const OpenNode* node, std::vector<at::Tensor> outputs) {
    if (results_in_first(op) && outputs.size() > 1) outputs.resize(1);
    if (is_copy(op) && outputs.size() == 1) {
      parameters_.note_copy(op.inputs[0].toTensor(), outputs[0]);
    }
    if (!computes(op.handle) || !std::any_of(outputs.begin(), outputs.end(), is_readable)) return;
    if (casts_number(op)) return;
    AnomalyFrame frame = frame_of(op, node);
    frame.outputs = value_ranges(outputs);
    if (const auto scalar = lost_scalar(op, frame.outputs[0].dtype)) {
      lost_scalars_.note(outputs[0], *scalar);
    }
    const at::ScalarType dtype = frame.outputs[0].dtype;
    ran_in_16_bits_ = ran_in_16_bits_ || dtype == at::kHalf || dtype == at::kBFloat16;
    if (all_finite(frame.outputs)) {
      forgive(op);
      for (const at::Tensor& output : outputs)
        memory_.forget(output);  // gradients set to zero, say
      keep(op, std::move(frame));
    } else {
      judge(op, frame, outputs);
    }
  }

  /// What came into a node.
  void take(const OpenNode& node, const std::vector<at::Tensor>& gradients) {
    const std::vector<ValueRange> ranges = value_ranges(gradients);
    bool is_new = false;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (ranges[i].is_finite() || is_bad(gradients[i])) continue;
      is_new = true;
    }
    if (!is_new) return;
    AnomalyFrame frame{.op = node.name,
                       .node = node.name,
                       .module = node.module,
                       .reads_module = node.reads_module,
                       .outputs = ranges};
    add({.frame = std::move(frame), .inputs = ranges, .cause = AnomalyCause::arrived}, gradients);
  }

 private:
  enum class Memory : std::uint8_t {
    bad,     // an anomaly, or what it spread to
    masked,  // holds inf that the program asked for
  };
  struct Found {
    Anomaly anomaly;
    std::deque<AnomalyFrame> frames;                       // before it
    std::unordered_set<const c10::StorageImpl*> carriers;  // that no op has made finite
  };

  static AnomalyFrame frame_of(const OpenOp& op, const OpenNode* node) {
    const OpenOp* outermost = &op;
    while (outermost->outer != nullptr) outermost = outermost->outer;
    const std::string& name = op.name();
    const std::string& caller = outermost->name();
    return {.op = name,
            .caller = caller == name ? std::string() : caller,
            .node = node != nullptr ? node->name : std::string(),
            .module = op.module,
            .reads_module = op.reads_module};
  }

  /// What the step before left in `.grad` is no anomaly of this one.
  void note_old_gradients(const torch::nn::Module& model) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : model.parameters()) {
      if (parameter.defined()) gradients.push_back(parameter.grad());
    }
    const std::vector<ValueRange> ranges = value_ranges(gradients);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!ranges[i].is_finite()) memory_.note(gradients[i], Memory::bad);
    }
  }

  /// Not of ops inside one that computes: they are how it does so.
  void keep(const OpenOp& op, AnomalyFrame frame) {
    if (options_.frames == 0) return;
    for (const OpenOp* outer = op.outer; outer != nullptr; outer = outer->outer) {
      if (computes(outer->handle)) return;
    }
    if (frames_.size() == options_.frames) frames_.pop_front();
    frames_.push_back(std::move(frame));
  }

  /// Whether what is not finite began here.
  void judge(const OpenOp& op, AnomalyFrame& frame, const std::vector<at::Tensor>& outputs) {
    const std::vector<at::Tensor> read = tensors_read(op);
    const auto bad = [this](const at::Tensor& tensor) { return is_bad(tensor); };
    Anomaly anomaly;
    if (std::any_of(read.begin(), read.end(), bad)) {
      spread(read, outputs, frame.outputs);
      return;
    }
    anomaly.inputs = value_ranges(read);
    for (std::size_t i = 0; i < read.size(); ++i) {
      anomaly.inputs[i].parameter = parameter_of(read[i]);
    }
    if (is_asked_for(op, frame.outputs, read, anomaly.inputs)) {
      forgive(op);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (!frame.outputs[i].is_finite()) memory_.note(outputs[i], Memory::masked);
      }
      keep(op, std::move(frame));
      return;
    }
    if (std::any_of(outputs.begin(), outputs.end(), bad)) {  // by an op inside of this one
      spread(outputs, outputs, frame.outputs);
      return;
    }
    if (reads_scratch(op, read, anomaly.inputs)) return;
    anomaly.frame = std::move(frame);
    anomaly.after_low_precision = ran_in_16_bits_;
    for (const at::Tensor& tensor : read) {
      if (const double* const lost = lost_scalars_.find(tensor)) anomaly.lost_scalar = *lost;
    }
    if (!arrived(read, anomaly)) find_cause(op, anomaly);
    add(std::move(anomaly), outputs);
  }

  /// The outputs carry what the op read.
  void spread(const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& outputs,
              const std::vector<ValueRange>& ranges) {
    for (Found& found : found_) {
      bool was_read = false;
      for (const at::Tensor& tensor : read)
        was_read = found.carriers.erase(memory_of(tensor)) > 0 || was_read;
      if (was_read) carry(found, outputs, ranges);
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!ranges[i].is_finite()) memory_.note(outputs[i], Memory::bad);
    }
  }

  void carry(Found& found, const std::vector<at::Tensor>& tensors,
             const std::vector<ValueRange>& ranges) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (ranges[i].is_finite()) continue;
      memory_.note(tensors[i], Memory::bad);
      found.carriers.insert(memory_of(tensors[i]));
    }
  }

  /// The op's result is finite, or a mask: what it read is no anomaly on that account, and what ops
  /// inside of it made is none.
  void forgive(const OpenOp& op) {
    for (std::size_t i = op.found_before; i < found_.size(); ++i) found_[i].carriers.clear();
    if (op.found_before == 0 || reads_shape_alone(op)) return;
    for (const at::Tensor& tensor : tensors_read(op)) {
      if (!is_bad(tensor)) continue;
      for (Found& found : found_) found.carriers.erase(memory_of(tensor));
    }
  }

  static std::vector<at::Tensor> tensors_read(const OpenOp& op) {
    std::vector<at::Tensor> read;
    for (std::size_t i = 0; i < op.inputs.size(); ++i) {
      if (!op.is_read[i]) continue;
      for_each_tensor(OpArguments(&op.inputs[i], 1), [&](const at::Tensor& tensor) {
        if (is_readable(tensor)) read.push_back(tensor);
      });
    }
    return read;
  }

  /// Whether what is not finite was in memory that the op around this one made itself: mean in half
  /// copies its result before it is written, for one.
  bool reads_scratch(const OpenOp& op, const std::vector<at::Tensor>& read,
                     const std::vector<ValueRange>& ranges) const {
    const OpenOp* around = nullptr;  // not autocast's own kernel of the same op
    for (const OpenOp* outer = op.outer; outer != nullptr; outer = outer->outer) {
      if (outer->name() != op.name() && computes(outer->handle)) around = outer;
    }
    if (around == nullptr) return false;
    std::vector<const c10::StorageImpl*> given;
    for_each_tensor(OpArguments(around->inputs.data(), around->inputs.size()),
                    [&](const at::Tensor& tensor) { given.push_back(memory_of(tensor)); });
    bool is_scratch = false;
    for (std::size_t i = 0; i < read.size(); ++i) {
      if (ranges[i].is_finite() || memory_.find(read[i]) != nullptr) continue;
      if (std::find(given.begin(), given.end(), memory_of(read[i])) != given.end()) return false;
      is_scratch = true;
    }
    return is_scratch;
  }

  /// The tensor's memory; of what `copied` made, that of the original.
  const c10::StorageImpl* memory_of(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.has_storage()) return nullptr;
    const c10::StorageImpl* const* const original = originals_.find(tensor);
    return original != nullptr ? *original : tensor.storage().unsafeGetStorageImpl();
  }

  /// Whether an input was not finite already, other than by what the program asked for.
  bool arrived(const std::vector<at::Tensor>& read, Anomaly& anomaly) {
    for (std::size_t i = 0; i < read.size(); ++i) {
      const bool is_mask = memory_.find(read[i]) != nullptr;  // bad ones do not come here
      if (anomaly.inputs[i].is_finite() || is_mask) continue;
      anomaly.cause = AnomalyCause::arrived;
      memory_.note(read[i], Memory::bad);
    }
    return anomaly.cause == AnomalyCause::arrived;
  }

  /// Whether each inf of the result came as a scalar or is carried on. Of memory that no op wrote
  /// -inf alone is taken for a mask.
  bool is_asked_for(const OpenOp& op, const std::vector<ValueRange>& outputs,
                    const std::vector<at::Tensor>& read,
                    const std::vector<ValueRange>& inputs) const {
    bool asks_for_low = false, asks_for_high = false;
    for (const c10::IValue& input : op.inputs) {
      const double value = input.isDouble() ? input.toDouble() : 0;
      asks_for_low = asks_for_low || (nonfinite_bits(value) && value < 0);
      asks_for_high = asks_for_high || (nonfinite_bits(value) && value > 0);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].is_finite()) continue;
      const bool is_known = memory_.find(read[i]) != nullptr;
      const bool is_high = inputs[i].infs > inputs[i].negative_infs;
      if (inputs[i].nans > 0 || !inputs[i].parameter.empty()) return false;
      if (is_high && !is_known) return false;
      asks_for_low = asks_for_low || is_known || inputs[i].negative_infs > 0;
      asks_for_high = asks_for_high || is_known;
    }
    return std::all_of(outputs.begin(), outputs.end(), [&](const ValueRange& range) {
      const bool is_high = range.infs > range.negative_infs;
      return range.nans == 0 && (!is_high || asks_for_high) &&
             (range.negative_infs == 0 || asks_for_low);
    });
  }

  void find_cause(const OpenOp& op, Anomaly& anomaly) const {
    const auto bad = std::find_if(anomaly.frame.outputs.begin(), anomaly.frame.outputs.end(),
                                  [](const ValueRange& range) { return !range.is_finite(); });
    const at::ScalarType wide = wider_dtype(bad->dtype);
    auto outputs = run_again(op.handle, op.inputs, wide);
    if (!outputs.has_value()) return;
    if (results_in_first(op)) outputs->resize(1);
    anomaly.wide_dtype = wide;
    anomaly.wide_outputs = std::move(*outputs);
    if (!all_finite(anomaly.wide_outputs)) {
      anomaly.cause = AnomalyCause::model;
      return;
    }
    anomaly.cause = AnomalyCause::low_precision;
    if (!anomaly.frame.is_backward() || options_.loss_scale == nullptr) return;
    anomaly.loss_scale = options_.loss_scale();
    double largest = 0;
    for (const ValueRange& range : anomaly.wide_outputs) largest = std::max(largest, range.largest);
    if (anomaly.loss_scale > 1 && !overflows(largest / anomaly.loss_scale, bad->dtype)) {
      anomaly.cause = AnomalyCause::loss_scale;
    }
  }

  void add(Anomaly anomaly, const std::vector<at::Tensor>& carriers) {
    anomaly.rank = options_.rank;
    const std::vector<ValueRange> ranges = anomaly.frame.outputs;
    found_.push_back({std::move(anomaly), frames_, {}});
    carry(found_.back(), carriers, ranges);
  }

  bool is_bad(const at::Tensor& tensor) const {
    const Memory* const known = memory_.find(tensor);
    return known != nullptr && *known == Memory::bad;
  }

  ParameterMemory parameters_;
  AnomalyTraceOptions options_;
  KnownMemory<Memory> memory_;
  KnownMemory<const c10::StorageImpl*> originals_;
  KnownMemory<double> lost_scalars_;  // what an op read that its dtype does not hold
  std::deque<AnomalyFrame> frames_;
  std::vector<Found> found_;
  bool ran_in_16_bits_ = false;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
