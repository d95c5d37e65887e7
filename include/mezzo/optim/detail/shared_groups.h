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
/// the inner's when they are next settled, at the latest at the end of this.
class SharedGroups {
 public:
  using Group = torch::optim::OptimizerParamGroup;
  using Groups = std::vector<Group>;
  using Options = std::unique_ptr<torch::optim::OptimizerOptions>;

  /// `outer` and `outer_defaults` are empty, and outlive this. So does `inner`; it may end before
  /// only if no options were ended through `outer` since the groups were last settled.
  SharedGroups(Groups& outer, Options& outer_defaults, torch::optim::Optimizer& inner)
      : outer_(outer), outer_defaults_(outer_defaults), inner_(inner) {
    settle();
  }
  SharedGroups(const SharedGroups&) = delete;
  SharedGroups& operator=(const SharedGroups&) = delete;
  ~SharedGroups() {
    settle_ended_options();
    let_go();
    (void)outer_defaults_.release();
  }

  /// Groups and parameters added to or removed from one optimizer are added to or removed from the
  /// other.
  /// \throws c10::Error where that cannot be: parameters that both have now, or a group that was
  ///   changed at both
  void settle() {
    if (!agree()) {
      follow_ended_options();
      follow_parameters();
      add_new_groups();
      share();
    }
    (void)outer_defaults_.release();
    outer_defaults_.reset(pointer_of_defaults(inner_).get());
  }

 private:
  /// As it was when both last agreed.
  struct Shared {
    torch::optim::OptimizerOptions* options;  // never read through: it may be gone
    std::vector<at::Tensor> parameters;
    Group* outer = nullptr;  // which group it is now, as match() finds; null: it was removed
    Group* inner = nullptr;
  };

  /// A group's pointer, which libtorch keeps protected.
  static Options& pointer_of(Group& group) {
    struct Access : Group {
      static Options Group::*pointer() { return &Access::options_; }
    };
    return group.*Access::pointer();
  }

  /// May be null, and `defaults()` dereferences it.
  static Options& pointer_of_defaults(torch::optim::Optimizer& optimizer) {
    struct Access : torch::optim::Optimizer {
      static Options Optimizer::*pointer() { return &Access::defaults_; }
    };
    return optimizer.*Access::pointer();
  }

  static bool same(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
    return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                      [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  }
  static bool has_options(Group& group, const Shared& one) {
    return pointer_of(group).get() == one.options;
  }
  static bool has_parameters(Group& group, const Shared& one) {
    return same(group.params(), one.parameters);
  }
  static bool is_unchanged(Group& group, const Shared& one) {
    return has_options(group, one) && has_parameters(group, one);
  }

  /// Which of `groups` the shared ones are now. An address alone does not tell, because new options
  /// may lie where others were destroyed. So groups that changed in nothing are found first, then
  /// those that kept their parameters, then their options, and last those in the same place.
  void match(Groups& groups, Group* Shared::*side) noexcept {
    for (Shared& one : shared_) one.*side = nullptr;
    const auto is_matched = [&](const Group& group) {
      return std::any_of(shared_.begin(), shared_.end(),
                         [&](const Shared& one) { return one.*side == &group; });
    };
    const auto match_if = [&](auto is_alike) {
      for (Shared& one : shared_) {
        if (one.*side != nullptr) continue;
        const auto group = std::find_if(groups.begin(), groups.end(), [&](Group& candidate) {
          return is_alike(candidate, one) && !is_matched(candidate);
        });
        if (group != groups.end()) one.*side = &*group;
      }
    };
    match_if(is_unchanged);
    match_if(has_parameters);
    match_if(has_options);
    match_if([&](Group& group, const Shared& one) {
      return pointer_of(group) != nullptr && &group - groups.data() == &one - shared_.data();
    });
  }
  void match() noexcept {
    match(outer_, &Shared::outer);
    match(inner_.param_groups(), &Shared::inner);
  }

  static bool ended_at_outer(const Shared& one) {
    return one.outer == nullptr || !has_options(*one.outer, one);
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
  /// those that replaced them, or drops the group if it was removed.
  void follow_ended_options() noexcept {
    match();
    Groups& inner = inner_.param_groups();
    // From the back, because `erase` moves the groups behind.
    for (auto group = inner.end(); group != inner.begin();) {
      --group;
      const auto one = std::find_if(shared_.begin(), shared_.end(), [&](const Shared& candidate) {
        return candidate.inner == &*group;
      });
      if (one == shared_.end() || !has_options(*group, *one) || !ended_at_outer(*one)) continue;
      (void)pointer_of(*group).release();
      if (one->outer != nullptr) {
        one->options = pointer_of(*one->outer).get();
        pointer_of(*group).reset(one->options);
      } else {
        group = inner.erase(group);
      }
    }
  }

  void follow_parameters() {
    match();
    for (Shared& one : shared_) {
      if (one.outer == nullptr || has_parameters(*one.outer, one)) continue;
      TORCH_CHECK(one.inner != nullptr && is_unchanged(*one.inner, one),
                  "MasterWeights: the parameters of a group were changed here, and at the inner "
                  "optimizer the group was changed or removed as well; change them at one of the "
                  "two");
      one.inner->params() = one.outer->params();
      one.parameters = one.outer->params();
    }
  }

  void add_new_groups() {
    shared_.reserve(shared_.size() + outer_.size());
    for (auto& group : outer_) {
      const bool is_known = std::any_of(shared_.begin(), shared_.end(),
                                        [&](const Shared& one) { return one.outer == &group; });
      if (is_known) continue;
      Options& own = pointer_of(group);
      Shared added{nullptr, group.params(), &group};
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

  /// Nobody will settle any more, and the inner must not be left with options that are gone. It is
  /// touched only if it would be: otherwise it may have ended already.
  void settle_ended_options() noexcept {
    match(outer_, &Shared::outer);
    if (std::none_of(shared_.begin(), shared_.end(), ended_at_outer)) return;
    try {
      settle();
    } catch (...) {  // of what comes after follow_ended_options, such as groups that both changed
    }
  }

  /// Options of an outer group that was never settled stay with it: they were never shared.
  void let_go() noexcept {
    match(outer_, &Shared::outer);
    for (const Shared& one : shared_) {
      if (!ended_at_outer(one)) (void)pointer_of(*one.outer).release();
    }
  }

  Groups& outer_;
  Options& outer_defaults_;
  torch::optim::Optimizer& inner_;
  std::vector<Shared> shared_;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
