/// \file
/// Which ops ask a WeightCache; and its members: one store, or one a thread.
#pragma once

#include <mezzo/autocast/detail/in_force.h>
#include <mezzo/autocast/detail/op_policy/op_names.h>
#include <mezzo/autocast/detail/op_policy/override_kernel.h>
#include <mezzo/autocast/detail/op_policy/override_registry.h>
#include <mezzo/autocast/detail/weight_cache/weight_store.h>
#include <mezzo/autocast/weight_cache.h>
#include <mezzo/base/detail/tensor_words.h>

#include <ATen/core/boxing/KernelFunction.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// An op that asks caches, by its full name.
struct CachedOp {
  const char* name;
  ArgumentRoles roles;
};

/// All of them. Those that a device does not lower, as the CPU does not the cells, are left alone
/// there: the ops that they are made of meet the cache.
inline constexpr auto cached_ops() {
  using enum ArgumentRole;
  constexpr ArgumentRoles kInputWeightBias{other, weight, weight};
  constexpr ArgumentRoles kFactors{left_factor, right_factor};
  constexpr ArgumentRoles kBiasAndFactors{right_factor, left_factor, right_factor};
  constexpr ArgumentRoles kCell{other, other, weight, weight, weight, weight};
  return std::array<CachedOp, 24>{{
      {"aten::linear", kInputWeightBias},
      {"aten::mm", kFactors},
      {"aten::matmul", kFactors},
      {"aten::bmm", kFactors},
      {"aten::addmm", kBiasAndFactors},
      {"aten::addbmm", kBiasAndFactors},
      {"aten::baddbmm", kBiasAndFactors},
      {"aten::conv1d", kInputWeightBias},
      {"aten::conv1d.padding", kInputWeightBias},
      {"aten::conv2d", kInputWeightBias},
      {"aten::conv2d.padding", kInputWeightBias},
      {"aten::conv3d", kInputWeightBias},
      {"aten::conv3d.padding", kInputWeightBias},
      {"aten::conv_tbc", kInputWeightBias},
      {"aten::conv_transpose1d", kInputWeightBias},
      {"aten::conv_transpose2d.input", kInputWeightBias},
      {"aten::conv_transpose3d.input", kInputWeightBias},
      {"aten::_convolution", kInputWeightBias},
      {"aten::prelu", {other, weight}},
      {"aten::lstm_cell", kCell},
      {"aten::gru_cell", kCell},
      {"aten::rnn_tanh_cell", kCell},
      {"aten::rnn_relu_cell", kCell},
      {"aten::mkldnn_rnn_layer", {other, weight, weight, weight, weight}},
  }};
}

inline void install_cache_kernels() {
  if (cache_ops_are_installed()) return;
  for (const auto& [name, roles] : cached_ops()) {
    const auto op = find_op(name);
    TORCH_CHECK(op.has_value(), "install_op_overrides: this libtorch (", TORCH_VERSION,
                ") has no operator ", name, "; use libtorch 2.11, or leave the WeightCache out");
    check_no_other_mezzo_overrides(*op);
  }
  for (const auto& [name, roles] : cached_ops()) {
    const auto op = find_op(name);
    const auto kernel = [&op, &asked = roles](c10::DeviceType device, OpSlot slot) {
      return c10::KernelFunction::makeFromBoxedFunctor(
          std::make_unique<CachingKernel>(*op, asked, device, slot));
    };
    override_registry().install_cache_kernel(*op, kernel);
  }
  cache_ops_are_installed() = true;
}

inline void check_can_be_held(const at::Tensor& weight) {
  TORCH_CHECK(weight.defined(),
              "weight is undefined; construct the module before its parameters are passed");
  TORCH_CHECK(weight.is_floating_point(), "weight: ", tensor_words(weight),
              " is never cast by autocast; pass a parameter of a floating dtype");
  TORCH_CHECK(!weight.is_inference(), "weight: ", tensor_words(weight),
              " was made in inference mode, and has no version that tells "
              "when it changes; make or load the model outside of c10::InferenceMode");
  TORCH_CHECK(can_be_held(weight), "weight: ", tensor_words(weight),
              " is no dense leaf without forward gradient; pass the "
              "parameter itself, not what is computed from it");
  TORCH_CHECK(shown_by(weight)->is_same(weight), "weight: ", tensor_words(weight),
              " is a view of the whole of another tensor; pass that "
              "tensor, under which regions look the copy up");
}

inline void check_low_precision(const at::Tensor& weight, at::ScalarType dtype, const char* what) {
  TORCH_CHECK(c10::isFloatingType(dtype) && dtype != weight.scalar_type(), what, " is ",
              dtype_name(dtype), ", which is no low precision of the weight (",
              tensor_words(weight), "); use torch::kHalf or torch::kBFloat16");
}

inline void check_copy(const at::Tensor& weight, const at::Tensor& copy) {
  TORCH_CHECK(copy.defined(), "copy is undefined; pass what buffer_for(weight, dtype) returned");
  check_low_precision(weight, copy.scalar_type(), "copy");
  TORCH_CHECK(copy.sizes() == weight.sizes(), "copy is ", tensor_words(copy), ", and the weight ",
              tensor_words(weight), "; pass what buffer_for(weight, dtype) returned");
  TORCH_CHECK(is_laid_out_as(copy, weight), "copy has the strides ", copy.strides(),
              ", and the weight ", weight.strides(),
              "; give both the same memory format, as buffer_for does");
  TORCH_CHECK(copy.device() == weight.device(), "copy is on ", copy.device(),
              ", and the weight on ", weight.device(),
              "; pass what buffer_for(weight, dtype) returned");
  TORCH_CHECK(!copy.is_inference() && can_be_held(copy) && !copy.requires_grad(),
              "copy requires grad, is not dense, or was made in inference mode; pass what "
              "buffer_for(weight, dtype) returned");
}

}  // namespace detail

class WeightCache::Shared final : public detail::CacheOwner,
                                  public std::enable_shared_from_this<WeightCache::Shared> {
 public:
  explicit Shared(const WeightCacheOptions& options)
      : CacheOwner([](CacheOwner& owner) -> std::shared_ptr<detail::WeightCasts> {
          return static_cast<Shared&>(owner).store_of_this_thread();
        }),
        options_(options),
        for_all_(options.max_bytes, options.keep_trainable) {}

  /// The calling thread ends.
  void forget_this_thread() noexcept {
    std::shared_ptr<detail::WeightStore> own;  // dies after the lock
    const std::lock_guard lock(mutex_);
    if (const auto found = by_thread_.find(std::this_thread::get_id()); found != by_thread_.end()) {
      own = std::move(found->second);
      by_thread_.erase(found);
    }
  }

  /// The store that serves the calling thread.
  detail::WeightStore& store() { return *store_of_this_thread(); }

  std::shared_ptr<detail::WeightStore> store_of_this_thread() {
    if (!options_.thread_isolated) {
      return std::shared_ptr<detail::WeightStore>(shared_from_this(), &for_all_);
    }
    const std::lock_guard lock(mutex_);
    auto& own = by_thread_[std::this_thread::get_id()];
    if (own == nullptr) {
      own = std::make_shared<detail::WeightStore>(options_.max_bytes, options_.keep_trainable);
      HoldersForThread::add(weak_from_this());
    }
    return own;
  }

  /// From when on a trainable weight's copy is current for the calling thread: the beginning of its
  /// region, or now.
  std::uint64_t since() const {
    for (const auto& cache : detail::thread_caches()) {
      if (cache.owner.get() == this) return cache.since;
    }
    return std::numeric_limits<std::uint64_t>::max();
  }

  /// All stores, kept alive for as long as the caller looks at them.
  std::vector<std::shared_ptr<detail::WeightStore>> stores() {
    if (!options_.thread_isolated) {
      return {store_of_this_thread()};
    }
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<detail::WeightStore>> all;
    for (const auto& [thread, store] : by_thread_) all.push_back(store);
    return all;
  }

  const WeightCacheOptions& options() const { return options_; }

 private:
  /// The caches that hold something for a thread, which tells them when it ends.
  class HoldersForThread {
   public:
    ~HoldersForThread() {
      has_ended_ = true;
      for (const auto& each : holders_) {
        if (const auto holder = each.lock()) holder->forget_this_thread();
      }
    }

    /// After the end, where static objects of the main thread are, what is held stays until the
    /// cache goes.
    static void add(const std::weak_ptr<Shared>& holder) {
      if (has_ended_) return;
      static thread_local HoldersForThread own;
      std::erase_if(own.holders_, [](const auto& each) { return each.expired(); });
      own.holders_.push_back(holder);
    }

   private:
    static inline thread_local bool has_ended_ = false;
    std::vector<std::weak_ptr<Shared>> holders_;
  };

  WeightCacheOptions options_;
  detail::WeightStore for_all_;
  std::mutex mutex_;
  std::map<std::thread::id, std::shared_ptr<detail::WeightStore>> by_thread_;
};

MEZZO_INLINE WeightCache::WeightCache(WeightCacheOptions options) {
  TORCH_CHECK(options.max_bytes >= 0, "max_bytes is ", options.max_bytes,
              "; give a bound in bytes, or leave it out for none");
  shared_ = std::make_shared<Shared>(options);
}

MEZZO_INLINE at::Tensor WeightCache::buffer_for(const at::Tensor& weight,
                                                at::ScalarType dtype) const {
  detail::check_can_be_held(weight);
  detail::check_low_precision(weight, dtype, "dtype");
  return shared_->store().fixed_copy(weight, dtype);
}

MEZZO_INLINE void WeightCache::publish(
    const std::vector<std::pair<at::Tensor, at::Tensor>>& published) const {
  detail::WriteEvents events;
  for (const auto& [weight, copy] : published) {
    detail::check_can_be_held(weight);
    detail::check_copy(weight, copy);
    shared_->store().publish(weight, copy, events);
  }
}

MEZZO_INLINE bool WeightCache::holds(const at::Tensor& weight, at::ScalarType dtype) const {
  if (!weight.defined()) {
    return false;
  }
  const auto shown = detail::shown_by(weight);
  return detail::can_be_held(*shown) && shared_->store().holds(*shown, dtype, shared_->since());
}

MEZZO_INLINE bool WeightCache::is_asked_for(const at::Tensor& weight, at::ScalarType dtype) const {
  return weight.defined() && shared_->store().is_asked_for(weight, dtype);
}

MEZZO_INLINE void WeightCache::forget(const at::Tensor& weight) const {
  TORCH_CHECK(weight.defined(),
              "weight is undefined; pass a parameter, or call clear() for all of them");
  const auto shown = detail::shown_by(weight);
  for (auto& store : shared_->stores()) store->forget(shown->unsafeGetTensorImpl());
}

MEZZO_INLINE void WeightCache::clear() const {
  for (auto& store : shared_->stores()) store->forget(nullptr);
}

MEZZO_INLINE WeightCacheStatistics WeightCache::statistics() const {
  WeightCacheStatistics sum;
  for (auto& store : shared_->stores()) {
    const auto each = store->statistics();
    sum.casts += each.casts;
    sum.hits += each.hits;
    sum.published += each.published;
    sum.evicted += each.evicted;
    sum.bytes_cast += each.bytes_cast;
    sum.bytes_saved += each.bytes_saved;
    sum.bytes_held += each.bytes_held;
    sum.copies_held += each.copies_held;
  }
  return sum;
}

MEZZO_INLINE void WeightCache::reset_statistics() const {
  for (auto& store : shared_->stores()) store->reset_statistics();
}

MEZZO_INLINE const WeightCacheOptions& WeightCache::options() const { return shared_->options(); }

MEZZO_INLINE WeightCache::operator WeightCacheRef() const { return WeightCacheRef(shared_); }

MEZZO_INLINE WeightCache install_op_overrides(WeightCache cache) {
  detail::install_cache_kernels();
  return cache;
}

MEZZO_INLINE std::ostream& operator<<(std::ostream& stream,
                                      const WeightCacheStatistics& statistics) {
  return stream << "weight cache: " << statistics.hits << " hits, " << statistics.casts
                << " casts, " << statistics.published << " published, " << statistics.evicted
                << " evicted; " << statistics.bytes_saved << " bytes saved, "
                << statistics.bytes_cast << " cast, " << statistics.bytes_held << " held in "
                << statistics.copies_held << " copies";
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
