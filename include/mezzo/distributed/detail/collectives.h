/// \file
/// Blocking collectives of tensors and strings over a c10d backend, and checks that ranks agree.
#pragma once

#include <mezzo/base/detail/autocast_mode.h>
#include <mezzo/base/detail/exception_message.h>
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
      ": `backend` is null; pass a c10d backend, such as an MpiBackend, a ProcessGroupNCCL or "
      "process_group->getBackend(torch::kCUDA)");
  return backend;
}

/// Starts an all-reduce of a contiguous tensor.
inline WorkPtr all_reduce(const BackendPtr& backend, const at::Tensor& tensor,
                          c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduction;
  return backend->allreduce(tensors, options);
}

/// Gathers the inputs of all ranks in `output`, in rank order. Blocks.
inline void all_gather(const BackendPtr& backend, const at::Tensor& output,
                       const at::Tensor& input) {
  at::Tensor to = output.view({-1}), from = input.view({-1});  // Gloo requires 1-D tensors
  backend->_allgather_base(to, from)->wait();
}

/// Broadcasts `tensors`, whose shapes are equal on all ranks, from `root`. Coalesces tensors of one
/// device and dtype in messages of about 25 MiB. Blocks.
inline void broadcast(const BackendPtr& backend, const std::vector<at::Tensor>& tensors, int root) {
  if (backend->getSize() == 1) return;
  const c10::NoGradGuard no_grad;
  const auto broadcast_coalesced = [&](const std::vector<at::Tensor>& pack) {
    std::vector<at::Tensor> flat = {at::flatten_dense_tensors(pack)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    backend->broadcast(flat, options)->wait();
    if (backend->getRank() != root) {
      const std::vector<at::Tensor> parts = at::unflatten_dense_tensors(flat[0], pack);
      for (std::size_t i = 0; i < pack.size(); ++i) pack[i].copy_(parts[i]);
    }
  };
  // All ranks must use the same order of messages: the order in which devices and dtypes first
  // occur, because device indices may differ between ranks.
  TensorGroups<> groups;
  for (const at::Tensor& tensor : tensors) groups.get(tensor).push_back(tensor.detach());
  for (const auto& [device, dtype, all] : groups) {
    for (const auto& pack : torch::utils::take_tensors(all, std::size_t{25} << 20)) {
      broadcast_coalesced(pack.tensors);
    }
  }
  if (backend->getRank() != root) clear_autocast_cache();
}

/// Returns a device that the backend supports, for internal messages.
inline at::Device get_message_device(const c10d::Backend& backend) {
  return backend.getBackendName() == "nccl" ? at::kCUDA : at::kCPU;
}

/// Broadcasts a string from rank `root`. Blocks.
inline std::string broadcast_string(const BackendPtr& backend, std::string text, int root) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 28;
  const at::Device device = get_message_device(*backend);
  const at::Tensor length = at::tensor({static_cast<int64_t>(text.size())}).to(device);
  broadcast(backend, {length}, root);
  text.resize(static_cast<std::size_t>(length.item<int64_t>()));
  for (std::size_t begin = 0; begin < text.size(); begin += kMaxBytes) {
    const std::size_t size = std::min(kMaxBytes, text.size() - begin);
    const at::Tensor chunk = at::empty({static_cast<int64_t>(size)}, at::kByte);
    std::copy_n(text.data() + begin, size, static_cast<char*>(chunk.mutable_data_ptr()));
    const at::Tensor bytes = chunk.to(device);
    broadcast(backend, {bytes}, root);
    std::copy_n(static_cast<const char*>(bytes.cpu().const_data_ptr()), size, text.data() + begin);
  }
  return text;
}

/// Returns the strings of all ranks, in rank order. Blocks.
inline std::vector<std::string> all_gather_strings(const BackendPtr& backend,
                                                   const std::string& text) {
  const at::Device device = get_message_device(*backend);
  const int64_t world_size = backend->getSize();
  const at::Tensor device_lengths =
      at::empty({world_size}, at::TensorOptions(at::kLong).device(device));
  all_gather(backend, device_lengths, at::tensor({static_cast<int64_t>(text.size())}).to(device));
  const at::Tensor lengths = device_lengths.cpu();
  const at::Tensor padded = at::zeros({lengths.max().item<int64_t>()}, at::kByte);
  std::copy(text.begin(), text.end(), static_cast<char*>(padded.mutable_data_ptr()));
  const at::Tensor device_bytes =
      at::empty({world_size, padded.numel()}, at::TensorOptions(at::kByte).device(device));
  all_gather(backend, device_bytes, padded.to(device));
  const at::Tensor bytes = device_bytes.cpu();
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    texts.emplace_back(static_cast<const char*>(bytes[rank].const_data_ptr()),
                       static_cast<std::size_t>(lengths[rank].item<int64_t>()));
  }
  return texts;
}

/// Throws on all ranks if `failure` is not empty on one of them, with the message of the first.
inline void throw_if_any_rank_failed(const BackendPtr& backend, const char* caller,
                                     const std::string& failure) {
  const std::vector<std::string> failures = all_gather_strings(backend, failure);
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    TORCH_CHECK(failures[rank].empty(), caller, ": rank ", rank, " of ", failures.size(), ": ",
                failures[rank]);
  }
}

/// Calls `f` on rank 0, and returns its result on all ranks. If it throws, all ranks throw.
template <class F>
std::string run_on_rank0(const BackendPtr& backend, const char* caller, const F& f) {
  std::string text, failure;
  if (backend->getRank() == 0) failure = get_error_message([&] { text = f(); });
  throw_if_any_rank_failed(backend, caller, failure);
  return all_gather_strings(backend, text)[0];
}

/// Throws on all ranks if `text` differs between ranks, naming the first rank and line that differ
/// from rank 0, and `advice`.
inline void check_equal_on_all_ranks(const BackendPtr& backend, const char* caller,
                                     const std::string& text, const char* advice) {
  const std::vector<std::string> texts = all_gather_strings(backend, text);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    std::istringstream stream(texts[rank]), expected_stream(texts[0]);
    while (stream || expected_stream) {
      std::string line, expected;
      if (!std::getline(stream, line)) line = "nothing more";
      if (!std::getline(expected_stream, expected)) expected = "nothing more";
      TORCH_CHECK(line == expected, caller, ": rank ", rank, " has \"", line,
                  "\" where rank 0 has \"", expected, "\"; ", advice);
    }
  }
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
