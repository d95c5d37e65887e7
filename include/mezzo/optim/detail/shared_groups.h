#pragma once

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Lets an optimizer's groups hold the very options objects of another's, so that a rate, or any
/// other option, that is written at one of the two is read at the other.
///
/// libtorch gives every group a unique_ptr of its own. Here the inner optimizer's groups own the
/// objects and the outer's point there too, and this lets go of them before the outer is gone. An
/// object that was ended through the outer's groups (set_options, an erased group) is let go of by
/// the inner's when they are next settled.
class SharedGroups {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Options = std::unique_ptr<torch::optim::OptimizerOptions>;

  /// `outer` and `outer_defaults` are empty, and outlive this.
  SharedGroups(Groups& outer, Options& outer_defaults, torch::optim::Optimizer& inner)
      : outer_(outer), outer_defaults_(outer_defaults), inner_(inner) {
    settle();
    outer_defaults_.reset(&inner_.defaults());
  }
  SharedGroups(const SharedGroups&) = delete;
  SharedGroups& operator=(const SharedGroups&) = delete;
  ~SharedGroups() {
    let_go();
    (void)outer_defaults_.release();
  }

  /// Groups and parameters added to or removed from one optimizer are added to or removed from the
  /// other.
  /// \throws c10::Error where that cannot be: parameters that both have now, or changed
  void settle() {
    if (agree()) return;
    follow_ended_options();
    follow_parameters();
    add_new_groups();
    share();
  }

 private:
  /// As it was when both last agreed.
  struct Shared {
    torch::optim::OptimizerOptions* options;  // never read through: it may be gone
    std::vector<at::Tensor> parameters;
  };

  /// A group's pointer, which libtorch keeps protected.
  static Options& pointer_of(torch::optim::OptimizerParamGroup& group) {
    struct Access : torch::optim::OptimizerParamGroup {
      static Options OptimizerParamGroup::*pointer() { return &Access::options_; }
    };
    return group.*Access::pointer();
  }

  static bool same(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                      [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  }

  static auto find(Groups& groups, const torch::optim::OptimizerOptions* options) {
    return std::find_if(groups.begin(), groups.end(),
                        [&](auto& group) { return pointer_of(group).get() == options; });
  }
  auto find_shared(const torch::optim::OptimizerOptions* options) {
    return std::find_if(shared_.begin(), shared_.end(),
                        [&](const Shared& one) { return one.options == options; });
  }

  bool agree() {
    Groups& inner = inner_.param_groups();
    if (outer_.size() != shared_.size() || inner.size() != shared_.size()) return false;
    for (std::size_t i = 0; i < shared_.size(); ++i) {
      for (auto* const group : {&outer_[i], &inner[i]}) {
        if (pointer_of(*group).get() != shared_[i].options) return false;
        if (!same(group->params(), shared_[i].parameters)) return false;
      }
    }
    return true;
  }

  /// Options that were destroyed through the outer's groups: the inner lets go of them, and takes
  /// those that replaced them, or drops the group if none did.
  void follow_ended_options() {
    for (std::size_t i = 0; i < shared_.size(); ++i) {
      const auto group = find(inner_.param_groups(), shared_[i].options);
      if (group == inner_.param_groups().end()) continue;
      if (find(outer_, shared_[i].options) != outer_.end()) continue;
      (void)pointer_of(*group).release();
      auto* const now = i < outer_.size() ? pointer_of(outer_[i]).get() : nullptr;
      if (now != nullptr && find_shared(now) == shared_.end()) {
        pointer_of(*group).reset(now);
        shared_[i].options = now;
      } else {
        inner_.param_groups().erase(group);
      }
    }
  }

  void follow_parameters() {
    for (auto& group : outer_) {
      const auto shared = find_shared(pointer_of(group).get());
      if (shared == shared_.end() || same(group.params(), shared->parameters)) continue;
      const auto inner = find(inner_.param_groups(), shared->options);
      if (inner == inner_.param_groups().end()) continue;
      TORCH_CHECK(same(inner->params(), shared->parameters),
                  "MasterWeights: the parameters of a group were changed both here and at the "
                  "inner optimizer; change them at one of the two");
      inner->params() = group.params();
      shared->parameters = group.params();
    }
  }

  void add_new_groups() {
    shared_.reserve(shared_.size() + outer_.size());
    for (auto& group : outer_) {
      Options& own = pointer_of(group);
      if (own != nullptr && find_shared(own.get()) != shared_.end()) continue;
      Shared added{nullptr, group.params()};
      inner_.add_param_group(group);
      Options& inners = pointer_of(inner_.param_groups().back());
      own != nullptr ? inners.reset(own.get()) : own.reset(inners.get());
      added.options = own.get();
      shared_.push_back(std::move(added));
    }
  }

  /// Allocates first: an options object must not be held twice by what an exception destroys.
  void share() {
    Groups groups;
    std::vector<Shared> shared;
    for (auto& group : inner_.param_groups()) {
      groups.emplace_back(group.params());
      shared.push_back({pointer_of(group).get(), group.params()});
    }
    let_go();
    outer_.swap(groups);
    shared_.swap(shared);
    for (std::size_t i = 0; i < shared_.size(); ++i) {
      pointer_of(outer_[i]).reset(shared_[i].options);
    }
  }

  /// Options of an outer group that was never settled stay with it: they were never shared.
  void let_go() noexcept {
    for (auto& group : outer_) {
      const bool is_shared = find_shared(pointer_of(group).get()) != shared_.end();
      if (is_shared) (void)pointer_of(group).release();
    }
  }

  Groups& outer_;
  Options& outer_defaults_;
  torch::optim::Optimizer& inner_;
  std::vector<Shared> shared_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
