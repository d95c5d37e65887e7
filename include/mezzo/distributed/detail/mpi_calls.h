#pragma once

#if !__has_include(<mpi.h>)
#error "this header requires MPI: link the target mezzo::mpi, find_package(mezzo COMPONENTS mpi)"
#endif

#include <mezzo/base/version.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <mpi.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

/// Returns the flag of `get_flag`: MPI_Initialized or MPI_Finalized.
inline bool get_mpi_flag(int (*get_flag)(int*)) {
  int flag = 0;
  get_flag(&flag);
  return flag != 0;
}

/// Throws MPI's error message if `code` is an error.
inline void check_mpi(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  std::string message(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  MPI_Error_string(code, message.data(), &length);
  message.resize(static_cast<std::size_t>(length));
  TORCH_CHECK(false, function, " failed: ", message);
}

/// Returns the result of `query` (MPI_Comm_rank or MPI_Comm_size) for `communicator`.
inline int query_communicator(MPI_Comm communicator, int (*query)(MPI_Comm, int*)) {
  TORCH_CHECK(get_mpi_flag(&MPI_Initialized) && !get_mpi_flag(&MPI_Finalized),
              "MpiBackend: MPI is not initialized; construct a mezzo::MpiEnvironment first");
  TORCH_CHECK(communicator != MPI_COMM_NULL,
              "MpiBackend: `communicator` is MPI_COMM_NULL: this process is not one of its ranks; "
              "construct the backend only on its ranks");
  int result = 0;
  check_mpi(query(communicator, &result), "MPI_Comm_rank or MPI_Comm_size");
  return result;
}

/// Returns the MPI operation of a reduction; MPI_SUM for an average.
inline MPI_Op to_mpi_op(at::ScalarType dtype, c10d::ReduceOp::RedOpType reduction) {
  if (reduction == c10d::ReduceOp::MAX) return dtype == at::kBool ? MPI_LOR : MPI_MAX;
  if (reduction == c10d::ReduceOp::MIN) return dtype == at::kBool ? MPI_LAND : MPI_MIN;
  return MPI_SUM;
}

/// Returns the MPI datatype for reductions, or MPI_DATATYPE_NULL.
inline MPI_Datatype to_mpi_datatype(at::ScalarType dtype) {
  const std::pair<at::ScalarType, MPI_Datatype> types[] = {
      {at::kBool, MPI_C_BOOL},   {at::kByte, MPI_UINT8_T}, {at::kChar, MPI_INT8_T},
      {at::kShort, MPI_INT16_T}, {at::kInt, MPI_INT32_T},  {at::kLong, MPI_INT64_T},
      {at::kFloat, MPI_FLOAT},   {at::kDouble, MPI_DOUBLE}};
  for (const auto& [scalar_type, mpi_type] : types) {
    if (scalar_type == dtype) return mpi_type;
  }
  return MPI_DATATYPE_NULL;
}

/// Returns an MPI datatype of the element size (1 to 16 bytes), for copies.
inline MPI_Datatype get_opaque_datatype(const at::Tensor& tensor) {
  const std::array<MPI_Datatype, 5> types = {MPI_UINT8_T, MPI_UINT16_T, MPI_UINT32_T, MPI_UINT64_T,
                                             MPI_C_DOUBLE_COMPLEX};
  return types.at(static_cast<std::size_t>(
      std::countr_zero(static_cast<std::uint64_t>(tensor.element_size()))));
}

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
