#pragma once

#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/grad_buckets.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

// --- Layout: which parameter lies where ---------------------------------------------------------

/// What a layout must know of a parameter.
struct LayoutItem {
  std::size_t group;  ///< parameters of one group may share a bucket
  int64_t count;
  int64_t element_size;
};

struct BucketLayout {
  std::vector<std::size_t> items;
  std::vector<int64_t> offsets;  ///< of each item, in elements
  int64_t count = 0;             ///< elements, gaps between the items included
};

/// Returns buckets in the order of their first items, each of one group and of at most
/// `bucket_bytes`, or of one larger item.
inline std::vector<BucketLayout> lay_out(const std::vector<LayoutItem>& items, int64_t bucket_bytes,
                                         int64_t alignment = kDefaultAlignment) {
  constexpr auto kNone = static_cast<std::size_t>(-1);
  std::vector<BucketLayout> buckets;
  std::vector<std::size_t> open;  // the bucket that each group fills
  for (std::size_t i = 0; i < items.size(); ++i) {
    const LayoutItem& item = items[i];
    if (item.group >= open.size()) open.resize(item.group + 1, kNone);
    const int64_t aligned = alignment / item.element_size;
    int64_t offset = 0;
    if (open[item.group] != kNone) {
      const int64_t end = buckets[open[item.group]].count;
      offset = (end + aligned - 1) / aligned * aligned;
    }
    const bool is_full = (offset + item.count) * item.element_size > bucket_bytes;
    if (open[item.group] == kNone || (is_full && offset > 0)) {
      open[item.group] = buckets.size();
      buckets.emplace_back();
      offset = 0;
    }
    BucketLayout& bucket = buckets[open[item.group]];
    bucket.items.push_back(i);
    bucket.offsets.push_back(offset);
    bucket.count = offset + item.count;
  }
  return buckets;
}

/// Returns the least number of elements, at least `count`, that can be cut into `parts` equal parts
/// of a multiple of `alignment` bytes each. A single part has no end to align.
inline int64_t padded_count(int64_t count, int64_t element_size, int64_t parts,
                            int64_t alignment = kDefaultAlignment) {
  const int64_t multiple = parts == 1 ? 1 : alignment / element_size * parts;
  return (count + multiple - 1) / multiple * multiple;
}

/// Returns the dtype in which autograd accumulates the parameter's gradients: the parameter's own,
/// unless `set_grad_dtype` has been called.
inline at::ScalarType gradient_dtype(const at::Tensor& parameter) {
  const at::ScalarType dtype = parameter.grad_dtype().value_or(parameter.scalar_type());
  return is_training_dtype(dtype) ? dtype : parameter.scalar_type();
}

// --- BucketedGradients --------------------------------------------------------------------------

/// A parameter and the place of its gradient.
struct GradientSlot {
  explicit GradientSlot(at::Tensor of) : parameter(std::move(of)) {}

  at::Tensor parameter;
  std::size_t bucket = 0;
  /// A view into the bucket with its own version counter: a change of one gradient is no change of
  /// the others.
  at::Tensor place;
  at::ScalarType dtype = at::kFloat;  // the parameter's, when the place was made
  bool may_be_nonzero = false;        // whether the place may hold other values than zeros
  bool has_arrived = false;           // in this backward pass

  const at::Tensor& gradient() const { return parameter.grad(); }
  bool has_dense_gradient() const {
    return gradient().defined() && gradient().layout() == at::kStrided;
  }
  bool shares_storage() const {
    return gradient().has_storage() && gradient().storage().is_alias_of(place.storage());
  }
  /// Whether `.grad` is the place, perhaps by another tensor of the same memory.
  bool is_in_place() const {
    return shares_storage() && gradient().scalar_type() == place.scalar_type() &&
           gradient().storage_offset() == place.storage_offset() &&
           gradient().is_non_overlapping_and_dense() && !gradient().is_neg() &&
           !gradient().is_conj() && !gradient()._is_zerotensor() &&
           torch::autograd::utils::obeys_layout_contract(gradient(), parameter);
  }
};

/// The state of GradBuckets, at an address that hooks can refer to. Its buckets never change.
class BucketedGradients final : public std::enable_shared_from_this<BucketedGradients> {
 public:
  BucketedGradients(const std::vector<at::Tensor>& parameters, const GradBucketsOptions& options)
      : parameters_(parameters), slots_(parameters.begin(), parameters.end()) {
    check_parameters();
    make_buckets(options);
  }

  const std::vector<at::Tensor>& parameters() const noexcept { return parameters_; }
  const std::vector<GradBucket>& buckets() const noexcept { return buckets_; }
  /// Returns the view of the bucket where the gradient of parameter `number` lies, laid out like
  /// the parameter.
  const at::Tensor& place(std::size_t number) const { return slots_[number].place; }

  void install_hooks() {
    for (std::size_t number = 0; number < slots_.size(); ++number) {
      Hook::install(shared_from_this(), number, parameters_[number]);
    }
  }
  void remove_hooks() {
    for (const at::Tensor& parameter : parameters_) Hook::remove(this, parameter);
  }

  void reattach_gradients() {
    const std::lock_guard lock(mutex_);
    const c10::NoGradGuard no_grad;
    forget_pass();
    for (std::size_t number = 0; number < slots_.size(); ++number) {
      if (!slots_[number].gradient().defined()) continue;
      check_gradient(number);
      if (!slots_[number].has_dense_gradient()) continue;
      check_dtype(number);
      check_unrounded(number);
    }
    for (std::size_t number = 0; number < slots_.size(); ++number) settle(number);
  }

  void zero_grad(bool set_to_none) {
    const std::lock_guard lock(mutex_);
    const c10::NoGradGuard no_grad;
    forget_pass();
    if (!set_to_none) {
      for (const GradBucket& bucket : buckets_) bucket.flat.zero_();
    }
    for (GradientSlot& slot : slots_) {
      if (!slot.gradient().defined()) continue;
      at::Tensor& gradient = slot.parameter.mutable_grad();
      if (set_to_none) {
        gradient.reset();
      } else if (slot.has_dense_gradient()) {
        gradient = slot.place;
        slot.may_be_nonzero = true;
      } else {
        gradient = gradient.detach();
        gradient.zero_();
      }
    }
  }

  /// Makes the place of parameter `number` its gradient, if only other ranks have made one.
  void adopt_place(std::size_t number) {
    const std::lock_guard lock(mutex_);
    GradientSlot& slot = slots_[number];
    slot.parameter.mutable_grad() = slot.place;
    slot.may_be_nonzero = true;
  }

  void add_no_sync(int change) {
    const std::lock_guard lock(mutex_);
    no_sync_ += change;
  }
  bool is_no_sync() {
    const std::lock_guard lock(mutex_);
    return no_sync_ > 0;
  }

  /// Returns the callback's number.
  int64_t on_ready(std::function<void(std::size_t)> callback) {
    const std::lock_guard lock(mutex_);
    on_ready_ = std::move(callback);
    return ++ready_number_;
  }
  /// Removes the callback of that number, unless another has taken its place.
  void end_ready(int64_t callback) {
    const std::lock_guard lock(mutex_);
    if (callback == ready_number_) on_ready_ = nullptr;
  }

  /// The number of backward passes so far, passes that threw included. A pass inside another counts
  /// as part of it.
  int64_t passes() const noexcept { return passes_; }

  /// Counts the reductions that make these gradients averages or sums over ranks.
  void add_reductions(int change) noexcept { reductions_ += change; }
  /// Whether a reduction over other buckets changes the gradient of parameter `number` too.
  bool is_reduced_elsewhere(std::size_t number) const {
    return Hook::any_of(parameters_[number], [this](const BucketedGradients& other) {
      return &other != this && other.reductions_ > 0;
    });
  }

 private:
  /// Hears that a parameter's gradient is there. A tensor has one slot for such a
  /// hook, so this hook keeps, and calls first, the one that it found there.
  class Hook final : public torch::autograd::PostAccumulateGradHook {
   public:
    using Any = torch::autograd::PostAccumulateGradHook;

    Hook(std::weak_ptr<BucketedGradients> state, std::size_t number, std::unique_ptr<Any> previous)
        : state_(std::move(state)), number_(number), previous_(std::move(previous)) {}

    void operator()(const at::Tensor& parameter) override {
      if (previous_ != nullptr) (*previous_)(parameter);
      if (const auto state = state_.lock()) state->arrived(number_);
    }

    static void install(const std::shared_ptr<BucketedGradients>& state, std::size_t number,
                        const at::Tensor& parameter) {
      torch::autograd::impl::materialize_autograd_meta(parameter);
      auto previous = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameter, std::make_unique<Hook>(state, number, std::move(previous)));
    }

    /// Puts back the hook that was there. A hook under another owner's hook stays, and does nothing
    /// but call the one before it.
    static void remove(const BucketedGradients* state, const at::Tensor& parameter) {
      std::unique_ptr<Any>* link = &torch::autograd::impl::post_acc_grad_hooks(parameter);
      while (auto* const hook = dynamic_cast<Hook*>(link->get())) {
        if (hook->state_.lock().get() == state) {
          auto previous = std::move(hook->previous_);
          *link = std::move(previous);
          return;
        }
        link = &hook->previous_;
      }
    }

    /// Whether `is_meant(state)` holds for one of the states that hear of `parameter`.
    template <class IsMeant>
    static bool any_of(const at::Tensor& parameter, const IsMeant& is_meant) {
      const Any* link = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
      while (const auto* const hook = dynamic_cast<const Hook*>(link)) {
        const auto state = hook->state_.lock();
        if (state != nullptr && is_meant(*state)) return true;
        link = hook->previous_.get();
      }
      return false;
    }

   private:
    std::weak_ptr<BucketedGradients> state_;
    std::size_t number_;
    std::unique_ptr<Any> previous_;
  };

  /// A backward pass that has not ended: libtorch's number of the pass, and a pointer that expires
  /// when the pass ends or throws.
  struct ActivePass {
    int number;
    std::weak_ptr<void> life;
  };

  // Buckets

  void check_parameters() const {
    std::unordered_set<const at::TensorImpl*> seen;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& parameter = parameters_[i];
      TORCH_CHECK(parameter.defined(), "GradBuckets: parameter ", i, " is undefined; leave it out");
      const at::ScalarType dtype = parameter.scalar_type();
      TORCH_CHECK(parameter.layout() == at::kStrided && is_training_dtype(dtype),
                  "GradBuckets: ", parameter_words(i, parameter),
                  " should be dense, and of float32, float64, bfloat16 or float16; leave it out");
      TORCH_CHECK(parameter.is_leaf() && !parameter.is_inference(),
                  "GradBuckets: ", parameter_words(i, parameter),
                  " is no leaf, or was made under c10::InferenceMode; give the tensor that the "
                  "module registered, made outside of inference mode");
      TORCH_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second,
                  "GradBuckets: ", parameter_words(i, parameter),
                  " is given twice, as model->parameters() gives a weight that two modules share; "
                  "give it once");
    }
  }

  /// Gradients come in about the reverse order of the parameters.
  void make_buckets(const GradBucketsOptions& options) {
    // Parameters of two dtypes get two buckets even if their gradients have one dtype:
    // ShardedOptimizer keeps the parameters in buffers of the same layout.
    std::vector<std::tuple<at::Device, at::ScalarType, at::ScalarType>> groups;
    std::vector<LayoutItem> items;
    for (std::size_t number = slots_.size(); number-- > 0;) {
      const at::Tensor& parameter = parameters_[number];
      const at::ScalarType dtype = gradient_dtype(parameter);
      const std::tuple group(parameter.device(), dtype, parameter.scalar_type());
      const auto found = std::find(groups.begin(), groups.end(), group);
      items.push_back({static_cast<std::size_t>(found - groups.begin()), parameter.numel(),
                       static_cast<int64_t>(c10::elementSize(dtype))});
      if (found == groups.end()) groups.push_back(group);
    }
    const c10::InferenceMode no_inference(false);
    for (const BucketLayout& layout : lay_out(items, options.bucket_bytes, options.alignment)) {
      const LayoutItem& first = items[layout.items.front()];
      const auto [device, dtype, of_parameters] = groups[first.group];
      const int64_t count =
          padded_count(layout.count, first.element_size, options.parts, options.alignment);
      GradBucket& bucket = buckets_.emplace_back(GradBucket{
          device, dtype, {}, at::zeros({count}, at::TensorOptions().device(device).dtype(dtype))});
      for (std::size_t i = 0; i < layout.items.size(); ++i) {
        const std::size_t number = slots_.size() - 1 - layout.items[i];
        bucket.parameters.push_back(number);
        slots_[number].bucket = buckets_.size() - 1;
        slots_[number].dtype = of_parameters;
        slots_[number].place = at::empty({0}, bucket.flat.options());
        slots_[number].place.set_(bucket.flat.storage(), layout.offsets[i],
                                  parameters_[number].sizes(), dense_strides(parameters_[number]));
      }
    }
  }

  /// Returns the strides of a dense tensor that lies as `parameter` does.
  static std::vector<int64_t> dense_strides(const at::Tensor& parameter) {
    if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
    return at::empty(parameter.sizes(), at::TensorOptions().device(at::kMeta)).strides().vec();
  }

  // Gradients

  /// \throws c10::Error if the gradient, dense or sparse, cannot be its parameter's, or the
  ///   parameter is no longer what the place was made for
  void check_gradient(std::size_t number) const {
    const GradientSlot& slot = slots_[number];
    const at::Tensor& gradient = slot.gradient();
    const at::Tensor& parameter = slot.parameter;
    TORCH_CHECK(gradient.layout() == at::kStrided || gradient.is_sparse(),
                "GradBuckets: the gradient of ", parameter_words(number, parameter), " is ",
                tensor_words(gradient), "; make it dense, or sparse in COO layout");
    TORCH_CHECK(is_training_dtype(gradient.scalar_type()) &&
                    gradient.device() == parameter.device() &&
                    gradient.sizes() == parameter.sizes(),
                "GradBuckets: the gradient of ", parameter_words(number, parameter), " is ",
                tensor_words(gradient),
                "; set the parameter's mutable_grad() to a tensor like it, or to torch::Tensor()");
    TORCH_CHECK(gradient.is_sparse() || (parameter.scalar_type() == slot.dtype &&
                                         parameter.device() == slot.place.device() &&
                                         parameter.sizes() == slot.place.sizes()),
                "GradBuckets: ", parameter_words(number, parameter), " was ",
                tensor_words(slot.place.to(slot.dtype)),
                " when these GradBuckets (or the DataParallel ",
                "that made them) were made; cast and move the model first, then make them");
  }

  /// \throws c10::Error where backward adds up in float what the place would round to 16 bits
  void check_dtype(std::size_t number) const {
    const GradientSlot& slot = slots_[number];
    TORCH_CHECK(!is_low_precision(slot.place) || gradient_dtype(slot.parameter) != at::kFloat,
                "GradBuckets: gradients of ", parameter_words(number, slot.parameter),
                " are added up in float32 by now, and these GradBuckets (or the DataParallel that ",
                "made them) have room for ", dtype_name(slot.place.scalar_type()),
                "; call mezzo::accumulate_in_float before them");
  }

  /// \throws c10::Error for a gradient of float, as `unscale_` leaves it for a float master, that a
  ///   place of 16 bits would round: small unscaled values become zero there
  void check_unrounded(std::size_t number) const {
    const GradientSlot& slot = slots_[number];
    TORCH_CHECK(!is_low_precision(slot.place) || slot.gradient().scalar_type() != at::kFloat,
                "GradBuckets: the gradient of ", parameter_words(number, slot.parameter),
                " is float32, and its bucket would round it to ",
                dtype_name(slot.place.scalar_type()),
                "; take the step and zero_grad() first, or keep gradients in float32: call "
                "mezzo::accumulate_in_float before these GradBuckets");
  }

  /// Brings one gradient to its place, wherever it is. `arrives`: autograd has just made it.
  void settle(std::size_t number, bool arrives = false) {
    GradientSlot& slot = slots_[number];
    if (slot.gradient().defined()) check_gradient(number);
    // An unscaled float gradient of an earlier pass waits for its step: in 16 bits it would
    // underflow.
    const bool is_unscaled_in_float = slot.has_dense_gradient() && !arrives && !slot.has_arrived &&
                                      is_low_precision(slot.place) &&
                                      slot.gradient().scalar_type() == at::kFloat;
    if (is_unscaled_in_float && torch::autograd::get_current_graph_task_id() != -1) return;
    if (slot.has_dense_gradient()) {
      if (!slot.is_in_place()) move_to_place(slot);
      slot.may_be_nonzero = true;
    } else if (slot.may_be_nonzero) {
      slot.place.zero_();
      slot.may_be_nonzero = false;
    }
  }

  /// Copies the values, which may be of another floating dtype than the place.
  static void move_to_place(GradientSlot& slot) {
    // A gradient that shares the buffer's memory must not be overwritten while it is read.
    const at::Tensor gradient = slot.gradient().detach();
    slot.place.copy_(slot.shares_storage() ? gradient.clone() : gradient);
    slot.parameter.mutable_grad() = slot.place;
  }

  // Backward passes

  /// From the hook of parameter `number`, on one of autograd's threads.
  void arrived(std::size_t number) {
    std::function<void(std::size_t)> tell;
    {
      const std::lock_guard lock(mutex_);
      check_dtype(number);
      if (no_sync_ > 0) return;
      const c10::NoGradGuard no_grad;
      begin_pass();
      const at::Tensor& gradient = slots_[number].gradient();
      const bool has_history = gradient.defined() && gradient.requires_grad();  // create_graph
      if (!has_history) settle(number, /*arrives=*/true);
      if (!count_arrival(number)) return;
      tell = on_ready_;
    }
    tell(slots_[number].bucket);
  }

  /// Called at the first gradient of a backward pass. A pass that runs inside another, as a
  /// checkpoint's does, belongs to the outer one. A pass that threw has ended.
  void begin_pass() {
    const int pass = torch::autograd::get_current_graph_task_id();
    std::erase_if(active_passes_, [](const ActivePass& active) { return active.life.expired(); });
    const auto is_this = [pass](const ActivePass& active) { return active.number == pass; };
    if (std::any_of(active_passes_.begin(), active_passes_.end(), is_this)) return;
    if (active_passes_.empty()) {
      ++passes_;
      missing_.assign(buckets_.size(), 0);
      was_ready_.assign(buckets_.size(), false);
      for (std::size_t number = 0; number < slots_.size(); ++number) {
        slots_[number].has_arrived = false;
        if (slots_[number].parameter.requires_grad()) {
          ++missing_[slots_[number].bucket];
        } else {
          settle(number);
        }
      }
    }
    const auto life = std::make_shared<int>();
    active_passes_.push_back({pass, life});
    torch::autograd::Engine::get_default_engine().queue_callback(
        [weak = weak_from_this(), pass, life] {
          if (const auto state = weak.lock()) state->end_pass(pass);
        });
  }

  /// Reports the buckets that have parameters without a gradient in this pass.
  void end_pass(int pass) {
    std::vector<std::size_t> ready;
    std::function<void(std::size_t)> tell;
    {
      const std::lock_guard lock(mutex_);
      const auto is_this = [pass](const ActivePass& active) { return active.number == pass; };
      if (std::erase_if(active_passes_, is_this) == 0) return;
      if (!active_passes_.empty() || on_ready_ == nullptr) return;
      const c10::NoGradGuard no_grad;
      for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
        if (was_ready_[bucket]) continue;
        for (const std::size_t number : buckets_[bucket].parameters) settle(number);
        ready.push_back(bucket);
      }
      tell = on_ready_;
    }
    for (const std::size_t bucket : ready) tell(bucket);
  }

  /// Forgets passes that threw. Does nothing during a pass.
  void forget_pass() {
    if (torch::autograd::get_current_graph_task_id() == -1) active_passes_.clear();
  }

  /// Returns whether the arrival completes its bucket, and a callback waits for that.
  bool count_arrival(std::size_t number) {
    GradientSlot& slot = slots_[number];
    if (slot.has_arrived) {
      TORCH_CHECK(on_ready_ == nullptr || !was_ready_[slot.bucket], "GradBuckets: the gradient of ",
                  parameter_words(number, slot.parameter),
                  " came once more in one backward pass, after its bucket had been reported ready; "
                  "a parameter that several checkpointed calls share cannot be used with on_ready, "
                  "which DataParallel sets: call the shared layer outside of "
                  "activation_checkpoint");
      return false;
    }
    slot.has_arrived = true;
    if (--missing_[slot.bucket] > 0 || on_ready_ == nullptr) return false;
    was_ready_[slot.bucket] = true;
    return true;
  }

  const std::vector<at::Tensor> parameters_;
  std::vector<GradientSlot> slots_;
  std::vector<GradBucket> buckets_;

  std::atomic<int> reductions_ = 0;
  std::atomic<int64_t> passes_ = 0;

  std::mutex mutex_;  // guards what follows, and the slots, while hooks run
  std::function<void(std::size_t)> on_ready_;
  int64_t ready_number_ = 0;               // of the callback
  int no_sync_ = 0;                        // how many NoSync guards there are
  std::vector<ActivePass> active_passes_;  // several where one runs inside another
  std::vector<std::size_t> missing_;       // a bucket: how many gradients are still to come
  std::vector<bool> was_ready_;  // a bucket: whether on_ready was called for it in this pass
};

inline std::shared_ptr<BucketedGradients> shared(const GradBuckets& buckets) noexcept {
  return buckets.state_;
}

}  // namespace detail

// --- GradBuckets --------------------------------------------------------------------------------

inline GradBuckets::GradBuckets(const std::vector<at::Tensor>& parameters,
                                const GradBucketsOptions& options) {
  TORCH_CHECK(options.bucket_bytes > 0, "GradBuckets: bucket_bytes is ", options.bucket_bytes,
              "; it must be greater than 0");
  TORCH_CHECK(options.parts > 0, "GradBuckets: parts is ", options.parts,
              "; it must be greater than 0");
  const int64_t alignment = options.alignment;
  TORCH_CHECK(alignment >= 8 && (alignment & (alignment - 1)) == 0, "GradBuckets: alignment is ",
              alignment, "; it must be a power of two, 8 or more");
  state_ = std::make_shared<detail::BucketedGradients>(parameters, options);
  state_->install_hooks();
}

inline GradBuckets::~GradBuckets() {
  if (state_ != nullptr) state_->remove_hooks();
}

inline GradBuckets& GradBuckets::operator=(GradBuckets&& other) noexcept {
  if (this == &other) return *this;
  if (state_ != nullptr) state_->remove_hooks();
  state_ = std::move(other.state_);
  return *this;
}

inline const std::vector<at::Tensor>& GradBuckets::parameters() const noexcept {
  return state_->parameters();
}

inline const std::vector<GradBucket>& GradBuckets::buckets() const noexcept {
  return state_->buckets();
}

inline void GradBuckets::reattach_gradients() { state_->reattach_gradients(); }

inline void GradBuckets::zero_grad(bool set_to_none) { state_->zero_grad(set_to_none); }

inline void GradBuckets::on_ready(std::function<void(std::size_t bucket)> callback) {
  state_->on_ready(std::move(callback));
}

inline GradBuckets::NoSync GradBuckets::no_sync() { return NoSync(*this); }

inline GradBuckets::NoSync::NoSync(GradBuckets& buckets) : buckets_(detail::shared(buckets)) {
  buckets_->add_no_sync(1);
}

inline GradBuckets::NoSync::~NoSync() {
  if (buckets_ != nullptr) buckets_->add_no_sync(-1);
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
