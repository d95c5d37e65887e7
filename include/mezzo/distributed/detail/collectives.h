/// \file
/// What mezzo asks of a c10d backend, and how ranks find out that they differ.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/tensor_groups.h>
#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/flatten_dense_tensors.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/unflatten_dense_tensors.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/tensor_flatten.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Returns `backend`. \throws c10::Error if it is null
inline BackendPtr check_backend(BackendPtr backend, const char* caller) {
  TORCH_CHECK(
      backend, caller,
      ": `backend` is null; give a c10d backend, such as a MpiBackend, a ProcessGroupNCCL or "
      "process_group->getBackend(torch::kCUDA)");
  return backend;
}

/// Begins an all-reduce of `tensor`, which is contiguous.
inline WorkPtr all_reduce(const BackendPtr& backend, const at::Tensor& tensor,
                          c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction;
  return backend->allreduce(tensors, options);
}

/// Writes the ranks' inputs to `output`, `size` times as long, in the order of the ranks. Waits.
inline void all_gather(const BackendPtr& backend, const at::Tensor& output,
                       const at::Tensor& input) {
  at::Tensor to = output.view({-1}), from = input.view({-1});  // Gloo takes no other shape
  backend->_allgather_base(to, from)->wait();
}

/// Gives all ranks the root's values of `tensors`, which have the same shapes on all ranks: some 25
/// MiB of one device and dtype at a time. Waits.
inline void broadcast(const BackendPtr& backend, const std::vector<at::Tensor>& tensors, int root) {
  if (backend->getSize() == 1) return;
  const c10::NoGradGuard no_grad;
  const auto send = [&](const std::vector<at::Tensor>& pack) {
    std::vector<at::Tensor> flat = {at::flatten_dense_tensors(pack)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    backend->broadcast(flat, options)->wait();
    if (backend->getRank() != root) {
      const std::vector<at::Tensor> parts = at::unflatten_dense_tensors(flat[0], pack);
      for (std::size_t i = 0; i < pack.size(); ++i) pack[i].copy_(parts[i]);
    }
  };
  // All ranks must broadcast in the same order: that in which devices and dtypes first occur, not
  // that of device names, since the first device of one rank may be the second of another.
  TensorGroups<> groups;
  for (const at::Tensor& tensor : tensors) groups.get(tensor).push_back(tensor.detach());
  for (const auto& [device, dtype, all] : groups) {
    for (const auto& pack : torch::utils::take_tensors(all, std::size_t{25} << 20))
      send(pack.tensors);
  }
  if (backend->getRank() != root) clear_autocast_cache();
}

/// Returns a device whose tensors the backend takes, for messages of mezzo's own.
inline at::Device get_message_device(const c10d::Backend& backend) {
  return backend.getBackendName() == "nccl" ? at::kCUDA : at::kCPU;
}

/// Returns rank `from`'s text on all ranks.
inline std::string broadcast_string(const BackendPtr& backend, std::string text, int from) {
  constexpr std::size_t kMost = std::size_t{1} << 28;
  const at::Device device = get_message_device(*backend);
  const at::Tensor length = at::tensor({static_cast<int64_t>(text.size())}).to(device);
  broadcast(backend, {length}, from);
  text.resize(static_cast<std::size_t>(length.item<int64_t>()));
  for (std::size_t begin = 0; begin < text.size(); begin += kMost) {
    const std::size_t count = std::min(kMost, text.size() - begin);
    const at::Tensor here = at::empty({static_cast<int64_t>(count)}, at::kByte);
    std::copy_n(text.data() + begin, count, static_cast<char*>(here.mutable_data_ptr()));
    const at::Tensor bytes = here.to(device);
    broadcast(backend, {bytes}, from);
    std::copy_n(static_cast<const char*>(bytes.cpu().const_data_ptr()), count, text.data() + begin);
  }
  return text;
}

/// Returns every rank's text, on every rank.
inline std::vector<std::string> all_gather_strings(const BackendPtr& backend,
                                                   const std::string& own) {
  const at::Device device = get_message_device(*backend);
  const int64_t size = backend->getSize();
  const at::Tensor lengths = at::empty({size}, at::TensorOptions(at::kLong).device(device));
  all_gather(backend, lengths, at::tensor({static_cast<int64_t>(own.size())}).to(device));
  const at::Tensor lengths_here = lengths.cpu();
  const at::Tensor padded = at::zeros({lengths_here.max().item<int64_t>()}, at::kByte);
  std::copy(own.begin(), own.end(), static_cast<char*>(padded.mutable_data_ptr()));
  const at::Tensor all =
      at::empty({size, padded.numel()}, at::TensorOptions(at::kByte).device(device));
  all_gather(backend, all, padded.to(device));
  const at::Tensor all_here = all.cpu();
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < size; ++rank) {
    texts.emplace_back(static_cast<const char*>(all_here[rank].const_data_ptr()),
                       static_cast<std::size_t>(lengths_here[rank].item<int64_t>()));
  }
  return texts;
}

/// Calls `f`. Returns the message of what it threw; empty if it did not throw.
template <class F>
std::string get_error_message(const F& f) {
  try {
    f();
    return {};
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of a type of its own";
  }
}

/// Throws, on all ranks, the text of the first rank whose `failure` is not empty.
inline void throw_if_any_rank_failed(const BackendPtr& backend, const char* caller,
                                     const std::string& failure) {
  const std::vector<std::string> failures = all_gather_strings(backend, failure);
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    TORCH_CHECK(failures[rank].empty(), caller, ": rank ", rank, " of ", failures.size(), ": ",
                failures[rank]);
  }
}

/// Calls `f` on rank 0, and returns its text on all ranks; all throw what it throws.
template <class F>
std::string run_on_rank0(const BackendPtr& backend, const char* caller, const F& f) {
  std::string text, failure;
  if (backend->getRank() == 0) failure = get_error_message([&] { text = f(); });
  throw_if_any_rank_failed(backend, caller, failure);
  return all_gather_strings(backend, text)[0];
}

/// Throws, on all ranks, where one has another text than rank 0, naming the first lines that
/// differ, and what to do.
inline void check_equal_on_all_ranks(const BackendPtr& backend, const char* caller,
                                     const std::string& own, const char* advice) {
  const std::vector<std::string> texts = all_gather_strings(backend, own);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    std::istringstream theirs(texts[rank]), wanted(texts[0]);
    while (theirs || wanted) {
      std::string line, line_of_0;
      if (!std::getline(theirs, line)) line = "nothing more";
      if (!std::getline(wanted, line_of_0)) line_of_0 = "nothing more";
      TORCH_CHECK(line == line_of_0, caller, ": rank ", rank, " has \"", line,
                  "\" where rank 0 has \"", line_of_0, "\"; ", advice);
    }
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
