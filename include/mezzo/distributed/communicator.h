/// \file
/// What mezzo asks of whatever connects the processes ("ranks") of one training job, and the two
/// things that every answer shares: the reductions, and the handle of a collective under way.
/// mezzo moves no bytes between processes itself: distributed/mpi_communicator.h stands on MPI,
/// distributed/c10d_communicator.h on libtorch's process groups (NCCL).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <mezzo/base/version.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {

/// How the ranks' values of an element become one.
enum class Reduction : uint8_t {
  sum,
  /// The sum divided by the number of ranks, of floating dtypes. bfloat16 and half overflow only
  /// where the average itself does: MPI's are added up and divided in float and rounded once, those
  /// of others are divided before they are added.
  average,
  /// Of bools it is "or". Whether a NaN survives is the transport's matter (MPI: always; NCCL:
  /// not).
  max,
};

namespace detail {

/// A collective under way, as its communicator knows it. Destroying one never waits: whatever the
/// transport still reads or writes, the communicator keeps alive.
class PendingCollective {
 public:
  virtual ~PendingCollective() = default;
  virtual bool ready() = 0;
  virtual void wait() = 0;
  virtual std::string name() const = 0;
};

}  // namespace detail

/// A collective under way: moved, never copied, and waited for. One that is destroyed or assigned
/// to before that warns, and its tensors stay alive until the transport has let go of them. It is
/// used by one thread at a time, not necessarily the one that made it.
class [[nodiscard]] Work {
 public:
  /// Nothing to wait for.
  Work() noexcept = default;
  explicit Work(std::unique_ptr<detail::PendingCollective> pending) noexcept;
  ~Work();
  Work(Work&&) noexcept = default;
  Work& operator=(Work&& other) noexcept;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  /// Would `wait` return without waiting? Never waits itself, and moves the transport on: a caller
  /// that computes meanwhile does well to ask now and then.
  bool ready();

  /// Returns when the result may be used: tensors on the CPU may be read; of those on a GPU the
  /// current stream has been told to wait, and the host has not waited. Later calls do nothing.
  /// \throws c10::Error naming the rank, the collective and what the transport said; the tensors
  /// that it writes then hold anything
  void wait();

  /// Lets go of it without waiting or warning, for whoever gives up after an error.
  void abandon() noexcept { pending_.reset(); }

 private:
  void warn_if_unwaited() noexcept;

  std::unique_ptr<detail::PendingCollective> pending_;
};

/// The ranks of one job, and the collectives that all of them call.
///
/// A communicator is a handle: a copy stands for the same ranks. Every rank makes the same calls in
/// the same order, with tensors of the same dtype and number of elements and the same arguments;
/// collectives may be called from any thread, as long as that order holds. Calls return at once.
/// Until its request has been waited for, a tensor is neither read nor written, be it input or
/// output; the communicator keeps it alive. Tensors are strided, of any shape and contiguous or not
/// (values go in the order of their indices), on a device that the communicator `serves`. What is
/// written bumps its version counter; autograd sees nothing of it. Every rank ends with the same
/// bits.
///
/// - `all_reduce(tensor, reduction)`: each rank's `tensor` becomes the reduction of all.
/// - `broadcast(tensor, root)`: each rank's `tensor` becomes `root`'s.
/// - `all_gather(output, input)`: `output`, `size()` times as long, becomes the inputs in the order
///   of the ranks. `input` may be the rank's own part of `output`.
/// - `reduce_scatter(output, input, reduction)`: `input` is `size()` times as long; `output` is the
///   reduction of the ranks' part number `rank()`. It may be that part of `input`, whose other
///   parts stay as they are. Where `input` is bfloat16 or half, `output` may be float: those are
///   sent, and their reduction is not rounded.
/// - `barrier()`: its request is ready when all ranks have called it.
///
/// Wrong arguments throw c10::Error at the call; what goes wrong later, `wait` throws.
template <class C>
concept Communicator = std::copyable<C> &&
    requires(C& communicator, const C& constant, const at::Tensor& tensor, Reduction reduction,
             int root, c10::DeviceType device) {
  { constant.rank() } -> std::same_as<int>;
  { constant.size() } -> std::same_as<int>;
  { constant.serves(device) } -> std::same_as<bool>;
  { communicator.all_reduce(tensor, reduction) } -> std::same_as<Work>;
  { communicator.broadcast(tensor, root) } -> std::same_as<Work>;
  { communicator.all_gather(tensor, tensor) } -> std::same_as<Work>;
  { communicator.reduce_scatter(tensor, tensor, reduction) } -> std::same_as<Work>;
  { communicator.barrier() } -> std::same_as<Work>;
};

/// Any communicator as one type, itself a communicator: what classes keep that are not templates.
class AnyCommunicator {
 public:
  template <class C>
  requires(!std::same_as<std::remove_cvref_t<C>, AnyCommunicator> &&
           Communicator<std::remove_cvref_t<C>>)
      AnyCommunicator(C&& communicator)  // NOLINT: implicit, as for std::function
      : self_(std::make_shared<Model<std::remove_cvref_t<C>>>(std::forward<C>(communicator))) {}

  int rank() const { return self_->rank(); }
  int size() const { return self_->size(); }
  bool serves(c10::DeviceType device) const { return self_->serves(device); }

  Work all_reduce(const at::Tensor& tensor, Reduction reduction) {
    return self_->all_reduce(tensor, reduction);
  }
  Work broadcast(const at::Tensor& tensor, int root) { return self_->broadcast(tensor, root); }
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return self_->all_gather(output, input);
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, Reduction reduction) {
    return self_->reduce_scatter(output, input, reduction);
  }
  Work barrier() { return self_->barrier(); }

 private:
  struct Interface {
    virtual ~Interface() = default;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual bool serves(c10::DeviceType device) const = 0;
    virtual Work all_reduce(const at::Tensor& tensor, Reduction reduction) = 0;
    virtual Work broadcast(const at::Tensor& tensor, int root) = 0;
    virtual Work all_gather(const at::Tensor& output, const at::Tensor& input) = 0;
    virtual Work reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                Reduction reduction) = 0;
    virtual Work barrier() = 0;
  };

  template <class C>
  struct Model;

  std::shared_ptr<Interface> self_;
};

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE

#include <mezzo/distributed/detail/communicator_impl.h>  // IWYU pragma: export
