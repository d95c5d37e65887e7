/// \file
/// The processes ("ranks") of one training job, and the collectives that all of them call. mezzo
/// moves no bytes between processes itself: distributed/mpi_communicator.h stands on MPI,
/// distributed/c10d_communicator.h on libtorch's process groups (NCCL).
#pragma once

#include <mezzo/base/version.h>
#include <mezzo/distributed/work.h>  // IWYU pragma: export

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <concepts>
#include <cstdint>
#include <memory>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

class Communicator;

namespace detail {
class CollectiveLog;
struct CollectiveCall;

/// A member that `Handle` inherits is Communicator's, and has Communicator in its type.
template <class Handle>
concept InheritsCollectives = requires {
  requires std::same_as<decltype(&Handle::all_reduce),
                        Work (Communicator::*)(const at::Tensor&, Reduction)>;
  requires std::same_as<decltype(&Handle::broadcast),
                        Work (Communicator::*)(const at::Tensor&, int)>;
  requires std::same_as<decltype(&Handle::all_gather),
                        Work (Communicator::*)(const at::Tensor&, const at::Tensor&)>;
  requires std::same_as<decltype(&Handle::reduce_scatter),
                        Work (Communicator::*)(const at::Tensor&, const at::Tensor&, Reduction)>;
  requires std::same_as<decltype(&Handle::barrier), Work (Communicator::*)()>;
};
}  // namespace detail

/// One transport's collectives, which a new communicator derives from. It does what `Communicator`
/// promises of them, with arguments that are checked already; where a collective is done at once it
/// returns an empty Work.
class CommunicatorBackend {
 public:
  virtual ~CommunicatorBackend() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// May tensors be on such a device?
  virtual bool serves(c10::DeviceType device) const = 0;
  virtual Work all_reduce(const at::Tensor& tensor, Reduction reduction) = 0;
  virtual Work broadcast(const at::Tensor& tensor, int root) = 0;
  virtual Work all_gather(const at::Tensor& output, const at::Tensor& input) = 0;
  virtual Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                              Reduction reduction) = 0;
  virtual Work barrier() = 0;
};

/// The ranks of one job, and the collectives that all of them call.
///
/// A communicator is a handle: a copy stands for the same ranks. Every rank makes the same calls in
/// the same order, with tensors of the same dtype and number of elements and the same arguments;
/// collectives may be called from any thread, as long as that order holds. Calls return at once.
/// Until its work has been waited for, a tensor is neither read nor written, be it input or output;
/// the communicator keeps it alive. Tensors are strided, of any shape and contiguous or not (values
/// go in the order of their indices), on a device that the communicator `serves`. What is written
/// bumps its version counter; autograd sees nothing of it. Every rank ends with the same bits.
///
/// Wrong arguments throw c10::Error at the call, naming the rank; what goes wrong later, `wait`
/// throws.
class Communicator {
 public:
  /// \throws c10::Error if `backend` is null
  explicit Communicator(std::shared_ptr<CommunicatorBackend> backend);

  /// A class that derives from this one and redefines a collective would be copied without it:
  /// derive from CommunicatorBackend instead.
  template <std::derived_from<Communicator> Handle>
  requires(!detail::InheritsCollectives<Handle>) Communicator(const Handle&)
  = delete;

  int rank() const { return backend_->rank(); }
  int size() const { return backend_->size(); }
  bool serves(c10::DeviceType device) const { return backend_->serves(device); }

  /// Each rank's `tensor` becomes the reduction of all.
  Work all_reduce(const at::Tensor& tensor, Reduction reduction);
  /// Each rank's `tensor` becomes `root`'s.
  Work broadcast(const at::Tensor& tensor, int root);
  /// `output`, `size()` times as long, becomes the inputs in the order of the ranks. `input` may be
  /// the rank's own part of `output`.
  Work all_gather(const at::Tensor& output, const at::Tensor& input);
  /// `input` is `size()` times as long; `output` is the reduction of the ranks' part number
  /// `rank()`. It may be that part of `input`, whose other parts stay as they are. Where `input` is
  /// bfloat16 or half, `output` may be float: those are sent, and their reduction is not rounded.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, Reduction reduction);
  /// Its work is ready when all ranks have called it.
  Work barrier();

 private:
  friend class Watchdog;

  /// Into the watchdog's log too, where there is one.
  template <class Start>
  Work launch(const detail::CollectiveCall& call, const Start& start);

  std::shared_ptr<CommunicatorBackend> backend_;
  std::shared_ptr<detail::CollectiveLog> log_;  ///< null: no watchdog watches
  int64_t number_ = 0;                          ///< in the log
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/communicator_impl.h>  // IWYU pragma: export
