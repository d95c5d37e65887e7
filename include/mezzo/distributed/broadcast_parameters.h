/// \file
/// All ranks begin with the same model.
#pragma once

#include <mezzo/base/named_tensors.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collectives.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// Gives every rank the values of `root`'s tensors, in place, once it has compared what the ranks
/// have: names, dtypes, shapes and whether gradients are wanted, in their order. All ranks call it.
/// Waits until the values are there.
/// \throws c10::Error, on every rank and before anything is written, naming the first rank that
/// differs from `root` and the tensor in which it does
void broadcast_parameters(const NamedTensors& tensors, c10::intrusive_ptr<c10d::Backend> group,
                          int root = 0);

/// Compares a number that is to be the same on all ranks, such as of an epoch's batches: a rank
/// with fewer would leave the others waiting, or meet them an epoch further. All ranks call it.
///
///     mezzo::require_equal(world, "batches", batches_of_this_rank);
///
/// \throws c10::Error, on every rank, naming the first rank whose number is not rank 0's
void require_equal(c10::intrusive_ptr<c10d::Backend> group, const std::string& what, int64_t own);

namespace detail {

/// A line a tensor; a name with a line break of its own only makes a line more.
inline std::string describe(const NamedTensors& tensors) {
  std::ostringstream lines;
  for (const auto& [name, tensor] : tensors) {
    lines << name << ": ";
    if (tensor.defined()) {
      lines << tensor.scalar_type() << ' ' << tensor.sizes()
            << (tensor.requires_grad() ? ", trained\n" : ", not trained\n");
    } else {
      lines << "undefined\n";
    }
  }
  return lines.str();
}

/// Every rank's text, on every rank. `device` is one that the group takes.
inline std::vector<std::string> gather_texts(const std::string& own,
                                             const c10::intrusive_ptr<c10d::Backend>& group,
                                             at::Device device) {
  const auto on_device = [&](at::ScalarType dtype) {
    return at::TensorOptions().dtype(dtype).device(device);
  };
  const at::Tensor lengths = at::empty({group->getSize()}, on_device(at::kLong));
  detail::all_gather(group, lengths,
                     at::tensor({static_cast<int64_t>(own.size())}, on_device(at::kLong)))
      .wait();
  const at::Tensor lengths_here = lengths.cpu();
  const int64_t longest = lengths_here.max().item<int64_t>();
  const at::Tensor padded = at::zeros({longest}, at::kByte);
  std::copy(own.begin(), own.end(), static_cast<char*>(padded.mutable_data_ptr()));
  const at::Tensor all = at::empty({group->getSize(), longest}, on_device(at::kByte));
  detail::all_gather(group, all, padded.to(device)).wait();

  const at::Tensor all_here = all.cpu();
  std::vector<std::string> texts;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const auto length = static_cast<std::size_t>(lengths_here.const_data_ptr<int64_t>()[rank]);
    const auto* const begin = static_cast<const char*>(all_here.const_data_ptr()) + rank * longest;
    texts.emplace_back(begin, length);
  }
  return texts;
}

/// The first lines of two different texts that differ; of one that has ended, "nothing more".
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

/// Throws for the first rank whose `words_of_step` are not rank 0's. All ranks, of which one at
/// least has other words, call it together.
[[noreturn]] inline void throw_other_step(const char* caller, const std::string& words,
                                          const c10::intrusive_ptr<c10d::Backend>& group,
                                          at::Device device) {
  const std::vector<std::string> texts = gather_texts(words, group, device);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const auto [theirs, firsts] = first_difference(texts[rank], texts[0]);
    TORCH_CHECK(false, caller, " on rank ", group->getRank(), ": rank ", rank,
                " steps with another \"", theirs, "\" than rank 0, which has \"", firsts,
                "\"; give the loss scale and the optimizer the same options, schedule and file on "
                "all ranks, and begin again from a checkpoint");
  }
  TORCH_CHECK(false, caller, " on rank ", group->getRank(),
              ": the ranks' steps differ; begin again from a checkpoint on all ranks");
}

}  // namespace detail

inline void require_equal(c10::intrusive_ptr<c10d::Backend> group, const std::string& what,
                          int64_t own) {
  const int here = detail::checked(group, "require_equal")->getRank();
  const auto all = detail::gather_texts(std::to_string(own), group, detail::device_of(*group));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    TORCH_CHECK(all[rank] == all[0], "require_equal on rank ", here, ": rank ", rank, " has ",
                all[rank], " ", what, " where rank 0 has ", all[0],
                "; give all ranks as many: DistributedRandomSampler deals samples so");
  }
}

inline void broadcast_parameters(const NamedTensors& tensors,
                                 c10::intrusive_ptr<c10d::Backend> group, int root) {
  const int rank_here = detail::checked(group, "broadcast_parameters")->getRank();
  TORCH_CHECK(root >= 0 && root < group->getSize(), "broadcast_parameters on rank ", rank_here,
              ": `root` must be 0 to ", group->getSize() - 1, ", but is ", root);
  at::Device device = detail::device_of(*group);
  if (!tensors.empty() && tensors[0].second.defined()) device = tensors[0].second.device();
  const auto texts = detail::gather_texts(detail::describe(tensors), group, device);
  const std::string& of_root = texts[static_cast<std::size_t>(root)];
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] == of_root) continue;
    const auto [theirs, roots] = detail::first_difference(texts[rank], of_root);
    TORCH_CHECK(false, "broadcast_parameters on rank ", group->getRank(), ": rank ", rank,
                " has another model than rank ", root, ": it has \"", theirs, "\" where rank ",
                root, " has \"", roots, "\"");
  }

  detail::PendingRequests requests;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) requests.add(detail::broadcast(group, tensor, root));
  }
  requests.wait();
}

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
