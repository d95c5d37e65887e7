#pragma once

#include <mezzo/base/version.h>
#include <mezzo/checkpoint/detail/checkpoint_part.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the message of the exception that is being handled. The message is never empty, for an
/// empty one stands for success.
inline std::string failure_of_current_exception() {
  std::string words = message_of_current_exception();
  return words.empty() ? "an exception without words" : words;
}

/// Calls `f`. Returns the message of what it threw; empty if it did not throw.
template <std::invocable F>
std::string failure_of(const F& f) {
  try {
    f();
    return {};
  } catch (...) {
    return failure_of_current_exception();
  }
}

/// Returns the first lines in which two texts differ; "nothing more" for a text that has ended.
inline std::pair<std::string, std::string> first_difference(const std::string& a,
                                                            const std::string& b) {
  std::istringstream in_a(a), in_b(b);
  const auto next = [](std::istringstream& in) {
    std::string line;
    return std::getline(in, line) ? line : std::string("nothing more");
  };
  while (true) {
    const std::string line_a = next(in_a), line_b = next(in_b);
    if (line_a != line_b || !in_a) return {line_a, line_b};
  }
}

/// Lets ranks throw, or go on, together: all of them make the same calls, and if one rank fails,
/// all throw the same message.
class RankAgreement {
 public:
  explicit RankAgreement(GroupPtr group) : RankAgreement(group, device_of(*group)) {}
  /// `device` is one that the group takes.
  RankAgreement(GroupPtr group, at::Device device) : group_(std::move(group)), device_(device) {}

  int rank() const { return group_->getRank(); }
  int size() const { return group_->getSize(); }
  const GroupPtr& group() const noexcept { return group_; }
  at::Device device() const noexcept { return device_; }

  /// Returns every rank's text, on every rank.
  std::vector<std::string> gather(const std::string& own) const {
    const auto options = [&](at::ScalarType dtype) {
      return at::TensorOptions().dtype(dtype).device(device_);
    };
    const at::Tensor lengths = at::empty({size()}, options(at::kLong));
    all_gather(group_, lengths, at::tensor({static_cast<int64_t>(own.size())}, options(at::kLong)))
        .wait();
    const at::Tensor lengths_here = lengths.cpu();
    const int64_t longest = lengths_here.max().item<int64_t>();
    const at::Tensor padded = at::zeros({longest}, at::kByte);
    std::copy(own.begin(), own.end(), static_cast<char*>(padded.mutable_data_ptr()));
    const at::Tensor all = at::empty({size(), longest}, options(at::kByte));
    all_gather(group_, all, padded.to(device_)).wait();

    const at::Tensor all_here = all.cpu();
    std::vector<std::string> texts;
    for (int rank = 0; rank < size(); ++rank) {
      const auto length = static_cast<std::size_t>(lengths_here.const_data_ptr<int64_t>()[rank]);
      texts.emplace_back(static_cast<const char*>(all_here[rank].const_data_ptr()), length);
    }
    return texts;
  }

  /// Throws, on all ranks, the text of the first rank whose `failure` is not empty.
  void check(const char* caller, const std::string& failure) const {
    throw_first(caller, gather(failure));
  }
  void throw_first(const char* caller, const std::vector<std::string>& failures) const {
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      TORCH_CHECK(failures[rank].empty(), caller, ": rank ", rank, " of ", size(), ": ",
                  failures[rank]);
    }
  }

  /// Throws where a rank has another text than rank `root`, naming the first lines that differ, and
  /// what to do.
  void check_alike(const char* caller, const std::string& own, const char* advice,
                   int root = 0) const {
    const std::vector<std::string> texts = gather(own);
    const std::string& of_root = texts[static_cast<std::size_t>(root)];
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank] == of_root) continue;
      const auto [theirs, roots] = first_difference(texts[rank], of_root);
      TORCH_CHECK(false, caller, ": rank ", rank, " has \"", theirs, "\" where rank ", root,
                  " has \"", roots, "\"; ", advice);
    }
  }

  /// Calls `f` on rank 0, and returns its result on all ranks; all throw what it throws.
  template <std::invocable F>
  std::string from_rank_0(const char* caller, const F& f) const {
    std::string text, failure;
    if (rank() == 0) failure = failure_of([&] { text = f(); });
    check(caller, failure);
    return gather(text)[0];
  }

 private:
  GroupPtr group_;
  at::Device device_;
};

/// What to do where ranks' buckets, options or words_of_step differ.
inline constexpr const char* kStepAlike =
    "give all ranks the same parameters and options, the loss scale and the optimizer the same "
    "schedule and file too, and begin again from a checkpoint on all ranks";

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
