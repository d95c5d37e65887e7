#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mezzo/base/detail/low_precision.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/communicator.h>

#include <cstdint>
#include <string>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

enum class Collective : uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, barrier };

inline const char* name_of(Reduction reduction) {
  if (reduction == Reduction::average) return "average";
  return reduction == Reduction::sum ? "sum" : "max";
}

/// One rank's call as ranks compare it and errors name it. `numel` counts what goes in.
struct CollectiveCall {
  Collective collective;
  at::ScalarType dtype = at::kByte;
  int64_t numel = 0;
  Reduction reduction = Reduction::sum;
  int root = 0;

  bool operator==(const CollectiveCall&) const = default;

  std::string name() const {
    const std::string of = c10::str(" of ", numel, " ", c10::toString(dtype));
    switch (collective) {
      case Collective::all_reduce:
        return c10::str("all_reduce(", name_of(reduction), ")", of);
      case Collective::broadcast:
        return c10::str("broadcast from rank ", root, of);
      case Collective::all_gather:
        return "all_gather" + of;
      case Collective::reduce_scatter:
        return c10::str("reduce_scatter(", name_of(reduction), ")", of);
      case Collective::barrier:
        break;
    }
    return "barrier";
  }
};

/// Reads alike in every communicator: what one refuses the other does too.
class CollectiveArguments {
 public:
  template <class C>
  CollectiveArguments(const char* collective, const C& communicator)
      : collective_(collective), rank_(communicator.rank()), size_(communicator.size()) {}

  template <class C>
  void check(const char* argument, const at::Tensor& tensor, const C& communicator) const {
    TORCH_CHECK(tensor.defined(), collective_, " on rank ", rank_, ": `", argument,
                "` is undefined");
    TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg(),
                collective_, " on rank ", rank_, ": `", argument,
                "` must be a dense tensor whose values lie in memory as they are");
    TORCH_CHECK(communicator.serves(tensor.device().type()), collective_, " on rank ", rank_, ": `",
                argument, "` is on ", tensor.device(), ", which this communicator does not serve");
  }

  void check_written(const char* argument, const at::Tensor& tensor) const {
    TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, collective_, " on rank ",
                rank_, ": elements of `", argument,
                "` share memory and cannot be written; clone() it");
  }

  /// The `whole` is the `part` of each rank.
  void check_parts(const char* whole_name, const at::Tensor& whole, const char* part_name,
                   const at::Tensor& part) const {
    TORCH_CHECK(whole.scalar_type() == part.scalar_type(), collective_, " on rank ", rank_, ": `",
                whole_name, "` is ", whole.scalar_type(), " and `", part_name, "` ",
                part.scalar_type(), "; they must be of one dtype");
    check_part_sizes(whole_name, whole, part_name, part);
  }

  void check_part_sizes(const char* whole_name, const at::Tensor& whole, const char* part_name,
                        const at::Tensor& part) const {
    TORCH_CHECK(whole.device() == part.device(), collective_, " on rank ", rank_, ": `", whole_name,
                "` is on ", whole.device(), " and `", part_name, "` on ", part.device());
    TORCH_CHECK(whole.numel() == part.numel() * size_, collective_, " on rank ", rank_, ": `",
                whole_name, "` must have ", size_, " times the ", part.numel(), " elements of `",
                part_name, "`, one part a rank, but has ", whole.numel());
  }

  /// The same of what is reduced. Sums of bfloat16 and half may also be wanted in float, as they
  /// are before they are rounded.
  void check_reduced_parts(const at::Tensor& input, const at::Tensor& output) const {
    if (is_low_precision(input) && output.scalar_type() == at::kFloat) {
      check_part_sizes("input", input, "output", output);
    } else {
      check_parts("input", input, "output", output);
    }
  }

  void check_root(int root) const {
    TORCH_CHECK(root >= 0 && root < size_, collective_, " on rank ", rank_,
                ": `root` must be 0 to ", size_ - 1, ", but is ", root);
  }

  /// Sums are of numbers, averages of floating ones, maxima of what has an order.
  void check_reduction(const at::Tensor& tensor, Reduction reduction) const {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(dtype != at::kBool || reduction == Reduction::max, collective_, " on rank ", rank_,
                ": bools have no sum; take Reduction::max for \"or\", or count in int64");
    const bool number = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                        dtype == at::kBFloat16 || dtype == at::kByte || dtype == at::kChar ||
                        dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
    TORCH_CHECK(number || dtype == at::kBool, collective_, " on rank ", rank_, ": ", dtype,
                " cannot be reduced; cast it to float or an integer dtype");
    TORCH_CHECK(reduction != Reduction::average || at::isFloatingType(dtype), collective_,
                " on rank ", rank_, ": ", dtype,
                " has no average; cast it to float, or take Reduction::sum and divide");
  }

 private:
  const char* collective_;
  int rank_;
  int size_;
};

// What every communicator checks at the call.

template <class C>
void check_all_reduce(const C& communicator, const at::Tensor& tensor, Reduction reduction) {
  const CollectiveArguments arguments("all_reduce", communicator);
  arguments.check("tensor", tensor, communicator);
  arguments.check_written("tensor", tensor);
  arguments.check_reduction(tensor, reduction);
}

template <class C>
void check_broadcast(const C& communicator, const at::Tensor& tensor, int root) {
  const CollectiveArguments arguments("broadcast", communicator);
  arguments.check("tensor", tensor, communicator);
  arguments.check_written("tensor", tensor);
  arguments.check_root(root);
}

template <class C>
void check_all_gather(const C& communicator, const at::Tensor& output, const at::Tensor& input) {
  const CollectiveArguments arguments("all_gather", communicator);
  arguments.check("output", output, communicator);
  arguments.check("input", input, communicator);
  arguments.check_written("output", output);
  arguments.check_parts("output", output, "input", input);
}

template <class C>
void check_reduce_scatter(const C& communicator, const at::Tensor& output, const at::Tensor& input,
                          Reduction reduction) {
  const CollectiveArguments arguments("reduce_scatter", communicator);
  arguments.check("output", output, communicator);
  arguments.check("input", input, communicator);
  arguments.check_written("output", output);
  arguments.check_reduced_parts(input, output);
  arguments.check_reduction(input, reduction);
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
