#pragma once

#include <mezzo/base/detail/tensor_words.h>
#include <mezzo/base/version.h>
#include <mezzo/kernels/gradient_summary.h>
#include <mezzo/kernels/which_kernels.h>
#include <mezzo/optim/detail/bucketed_gradients.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Hears that a parameter's gradient is there. A tensor has one slot for such a hook, so this one
/// keeps, and calls first, the one that it found there.
template <class State>
class BucketHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  using Hook = torch::autograd::PostAccumulateGradHook;

  BucketHook(std::weak_ptr<State> state, std::size_t number, std::unique_ptr<Hook> previous)
      : state_(std::move(state)), number_(number), previous_(std::move(previous)) {}

  void operator()(const at::Tensor& parameter) override {
    if (previous_ != nullptr) (*previous_)(parameter);
    if (const auto state = state_.lock()) state->arrived(number_);
  }

  static void install(const std::shared_ptr<State>& state, std::size_t number,
                      const at::Tensor& parameter) {
    torch::autograd::impl::materialize_autograd_meta(parameter);
    auto previous = std::move(torch::autograd::impl::post_acc_grad_hooks(parameter));
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<BucketHook>(state, number, std::move(previous)));
  }

  /// Puts back what was there. Under somebody else's hook it stays, and does nothing but call it.
  static void remove(const State* state, const at::Tensor& parameter) {
    std::unique_ptr<Hook>* link = &torch::autograd::impl::post_acc_grad_hooks(parameter);
    while (auto* const hook = dynamic_cast<BucketHook*>(link->get())) {
      if (hook->state_.lock().get() == state) {
        auto previous = std::move(hook->previous_);
        *link = std::move(previous);
        return;
      }
      link = &hook->previous_;
    }
  }

  /// Whether `is_meant(state)` holds for one of those that hear of `parameter`.
  template <class IsMeant>
  static bool any_of(const at::Tensor& parameter, const IsMeant& is_meant) {
    const Hook* link = torch::autograd::impl::post_acc_grad_hooks(parameter).get();
    while (const auto* const hook = dynamic_cast<const BucketHook*>(link)) {
      const auto state = hook->state_.lock();
      if (state != nullptr && is_meant(*state)) return true;
      link = hook->previous_.get();
    }
    return false;
  }

 private:
  std::weak_ptr<State> state_;
  std::size_t number_;
  std::unique_ptr<Hook> previous_;
};

/// Gradients wait until there are so many bytes of them: enough for threads to share, and still in
/// the cache.
inline constexpr int64_t kReadTogetherBytes = int64_t{1} << 20;

inline void BucketedGradients::arrived(std::size_t number) {
  std::function<void(std::size_t)> tell;
  const std::size_t bucket = slots_[number].bucket;
  {
    const std::lock_guard lock(mutex_);
    if (no_sync_ > 0) return;
    const c10::NoGradGuard no_grad;
    begin_pass();
    take(number);
    if (!count_arrival(number)) return;
    tell = on_ready_;
  }
  tell(bucket);
}

/// At the first gradient of a backward pass. A pass that runs inside another, as a checkpoint's
/// does, belongs to it. One that threw is over, whether anybody said so or not.
inline void BucketedGradients::begin_pass() {
  const int pass = torch::autograd::get_current_graph_task_id();
  std::erase_if(active_passes_, [](const ActivePass& active) { return active.life.expired(); });
  const auto is_this = [pass](const ActivePass& active) { return active.number == pass; };
  if (std::any_of(active_passes_.begin(), active_passes_.end(), is_this)) return;
  if (active_passes_.empty()) {
    ++passes_;
    arrivals_.clear();
    missing_.assign(buckets_.size(), 0);
    was_ready_.assign(buckets_.size(), false);
    for (std::size_t number = 0; number < slots_.size(); ++number) {
      slots_[number].has_arrived = false;
      if (slots_[number].parameter.requires_grad()) {
        ++missing_[slots_[number].bucket];
      } else if (is_flat()) {
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

inline void BucketedGradients::end_pass(int pass) {
  std::vector<std::size_t> ready;
  std::function<void(std::size_t)> tell;
  {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(active_passes_.begin(), active_passes_.end(),
                     [pass](const ActivePass& active) { return active.number == pass; });
    if (found == active_passes_.end()) return;
    active_passes_.erase(found);
    if (!active_passes_.empty()) return;
    const c10::NoGradGuard no_grad;
    finish_pass(ready);
    tell = on_ready_;
  }
  for (const std::size_t bucket : ready) tell(bucket);
}

inline void BucketedGradients::finish_pass(std::vector<std::size_t>& ready) {
  read_pending();
  if (on_ready_ == nullptr) return;
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    if (was_ready_[bucket]) continue;
    for (const std::size_t number : buckets_[bucket].parameters) settle(number);
    ready.push_back(bucket);
  }
}

/// Outside of all passes: what is left is of one that threw.
inline void BucketedGradients::forget_pass() {
  if (torch::autograd::get_current_graph_task_id() == -1) active_passes_.clear();
}

/// Whether the arrival completes its bucket, for somebody who wants to know.
inline bool BucketedGradients::count_arrival(std::size_t number) {
  GradientSlot& slot = slots_[number];
  if (slot.has_arrived) {
    TORCH_CHECK(on_ready_ == nullptr || !was_ready_[slot.bucket], "GradBuckets: the gradient of ",
                parameter_words(number, slot.parameter),
                " came once more in one backward pass, after its bucket had been reported ready; "
                "a parameter that several checkpointed calls share cannot be used with on_ready, "
                "which DataParallel sets: call the shared layer outside of activation_checkpoint");
    return false;
  }
  slot.has_arrived = true;
  arrivals_.push_back(number);
  if (--missing_[slot.bucket] > 0 || on_ready_ == nullptr) return false;
  read_pending();
  was_ready_[slot.bucket] = true;
  return true;
}

/// Brings the gradient that has just come to its place, and reads it or leaves it to be read with
/// others.
inline void BucketedGradients::take(std::size_t number) {
  GradientSlot& slot = slots_[number];
  if (slot.gradient().defined() && slot.gradient().requires_grad()) return;  // create_graph
  const bool reads = options_.check_during_backward() && slot.has_dense_gradient();
  if (reads && has_cpu_loops(slot.parameter.device())) {
    if (slot.is_pending) return;
    slot.is_pending = true;
    pending_.push_back(number);
    pending_bytes_ += static_cast<int64_t>(slot.gradient().nbytes());
    if (pending_bytes_ >= kReadTogetherBytes) read_pending();
    return;
  }
  settle(number);
  if (reads) read_on_device(slot, number);
}

/// On the stream that made the gradient.
inline void BucketedGradients::read_on_device([[maybe_unused]] GradientSlot& slot,
                                              [[maybe_unused]] std::size_t number) {
#ifdef MEZZO_WITH_CUDA
  if (!has_cuda_kernels(slot.parameter.device())) return;
  const at::Tensor& gradient = slot.gradient();
  const int64_t bytes = cuda::partial_count(gradient) * cuda::partial_bytes();
  const at::Tensor& partials = slot.device_partials;
  // The parameter may have been cast or moved since the last pass.
  const bool fits =
      partials.defined() && partials.numel() == bytes && partials.device() == gradient.device();
  if (!fits) {
    slot.device_partials = at::empty({bytes}, gradient.options().dtype(at::kByte));
  }
  cuda::write_partials_({gradient}, {0}, slot.device_partials, nullptr);
  slot.mark.set(gradient, flat_of(slot));
#endif
}

/// Reads what waits, and on the way copies it to its place where it is not there yet.
inline void BucketedGradients::read_pending() {
  std::vector<std::size_t> numbers;
  std::vector<SummaryStretch> stretches;
  for (const std::size_t number : std::exchange(pending_, {})) {
    GradientSlot& slot = slots_[number];
    slot.is_pending = false;
    if (!slot.has_dense_gradient() || slot.gradient().requires_grad()) continue;
    const bool is_plain = is_laid_out_like(slot.gradient(), slot.parameter) &&
                          slot.gradient().scalar_type() == slot.parameter.scalar_type() &&
                          slot.gradient().sizes() == slot.parameter.sizes() &&
                          (!is_flat() || fits_place(slot));
    const bool is_foreign = is_flat() && !shares_storage(slot.gradient(), slot.place);
    if (!is_plain || !is_foreign) settle(number);
    void* const copy_to = is_plain && is_foreign ? slot.place.mutable_data_ptr() : nullptr;
    numbers.push_back(number);
    stretches.push_back(summary_stretch(slot.gradient(), copy_to));
  }
  pending_bytes_ = 0;
  const std::vector<GradientPartial> partials = summarize_cpu(stretches);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    GradientSlot& slot = slots_[numbers[i]];
    if (stretches[i].copy_to != nullptr) {
      slot.place.unsafeGetTensorImpl()->bump_version();
      slot.parameter.mutable_grad() = slot.place;
      slot.may_be_nonzero = true;
    }
    slot.partial = partials[i];
    slot.mark.set(slot.gradient(), flat_of(slot));
  }
}

inline void BucketedGradients::add_no_sync(int change) {
  const std::lock_guard lock(mutex_);
  no_sync_ += change;
}

inline bool BucketedGradients::is_no_sync() {
  const std::lock_guard lock(mutex_);
  return no_sync_ > 0;
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
