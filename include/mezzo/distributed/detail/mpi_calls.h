#pragma once

#include <mezzo/base/detail/float_bits.h>
#include <mezzo/base/version.h>
#include <mezzo/distributed/detail/collective_log.h>
#include <mezzo/distributed/work.h>

#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>
#include <c10/util/Exception.h>

#include <mpi.h>

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

inline bool mpi_is_initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}

inline bool mpi_is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

/// MPI's own words for an error code.
inline std::string mpi_error_words(int code) {
  std::string words(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, words.data(), &length) != MPI_SUCCESS) {
    return "error code " + std::to_string(code);
  }
  words.resize(static_cast<std::size_t>(length));
  return words;
}

/// `context` names the rank and the collective.
inline void check_mpi(int code, const char* call, const std::string& context) {
  TORCH_CHECK(code == MPI_SUCCESS, context, ": ", call, " failed: ", mpi_error_words(code));
}

/// mezzo's calls of MPI exclude one another over the whole process, as MPI_THREAD_SERIALIZED wants
/// it. Exported, so that shared libraries lock the same one; never destroyed.
C10_EXPORT inline std::mutex& mpi_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

/// MPI libraries put errors of non-blocking collectives down to MPI_COMM_WORLD (Open MPI 4) or
/// MPI_COMM_SELF (MPI 4), whose handler ends the program unless the user has set another: while one
/// of these lives, both return them. It is made under `mpi_mutex`.
class ReturnedMpiErrors {
 public:
  ReturnedMpiErrors() : world_(MPI_COMM_WORLD), self_(MPI_COMM_SELF) {}

 private:
  class Handler {
   public:
    explicit Handler(MPI_Comm communicator) : communicator_(communicator) {
      MPI_Comm_get_errhandler(communicator_, &before_);
      MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    }
    ~Handler() {
      MPI_Comm_set_errhandler(communicator_, before_);
      MPI_Errhandler_free(&before_);
    }
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;

   private:
    MPI_Comm communicator_;
    MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
  };

  Handler world_;
  Handler self_;
};

/// MPI_MAX may drop a NaN, and on one rank only.
template <class T>
void max_that_keeps_nan(void* in, void* inout, int* length, MPI_Datatype* /*type*/) {
  const T* const given = static_cast<const T*>(in);
  T* const kept = static_cast<T*>(inout);
  for (int i = 0; i < *length; ++i) kept[i] = max_or_nan(kept[i], given[i]);
}

/// MPI's reductions for the dtypes that it can add up without losing anything that torch keeps.
class MpiReductions {
 public:
  MpiReductions() {
    check_mpi(MPI_Op_create(max_that_keeps_nan<float>, 1, &max_float_), "MPI_Op_create",
              "MpiCommunicator");
    check_mpi(MPI_Op_create(max_that_keeps_nan<double>, 1, &max_double_), "MPI_Op_create",
              "MpiCommunicator");
  }
  ~MpiReductions() {
    if (mpi_is_finalized()) return;
    MPI_Op_free(&max_float_);
    MPI_Op_free(&max_double_);
  }
  MpiReductions(const MpiReductions&) = delete;
  MpiReductions& operator=(const MpiReductions&) = delete;

  MPI_Op op(at::ScalarType dtype, Reduction reduction) const {
    if (dtype == at::kBool) return MPI_LOR;
    if (reduction != Reduction::max) return MPI_SUM;
    if (dtype == at::kFloat) return max_float_;
    if (dtype == at::kDouble) return max_double_;
    return MPI_MAX;
  }

  static MPI_Datatype type(at::ScalarType dtype) {
    switch (dtype) {
      case at::kBool:
        return MPI_C_BOOL;
      case at::kByte:
        return MPI_UINT8_T;
      case at::kChar:
        return MPI_INT8_T;
      case at::kShort:
        return MPI_INT16_T;
      case at::kInt:
        return MPI_INT32_T;
      case at::kLong:
        return MPI_INT64_T;
      case at::kFloat:
        return MPI_FLOAT;
      case at::kDouble:
        return MPI_DOUBLE;
      default:
        TORCH_INTERNAL_ASSERT(false, "no MPI reduction of ", dtype);
    }
  }

 private:
  MPI_Op max_float_ = MPI_OP_NULL;
  MPI_Op max_double_ = MPI_OP_NULL;
};

/// A call that starts one of MPI's non-blocking collectives.
struct MpiCall {
  const char* name;                                  ///< for errors
  std::function<int(MPI_Request*)> start = nullptr;  ///< null: there is none. Returns MPI's code
};

/// What MPI is given at one time: one collective, and for some dtypes local work and a second one
/// behind it.
struct MpiPart {
  MpiCall first;
  std::function<void()> between = nullptr;  ///< null: nothing
  MpiCall second = {""};

  enum class Stage : uint8_t { waiting, first, second, done } stage = Stage::waiting;
  MPI_Request request = MPI_REQUEST_NULL;
};

/// One collective of this rank: its parts and what is to be done when all are there. The closures
/// keep the tensors.
struct MpiOperation {
  explicit MpiOperation(const CollectiveCall& of) : call(of) {}

  CollectiveCall call;
  std::vector<MpiPart> parts;
  std::function<void()> finish;  ///< null: nothing

  enum class Stage : uint8_t { announced, running, done } stage = Stage::announced;
  std::exception_ptr error;
  std::array<int64_t, 6> announcement{};
  std::vector<int64_t> announcements;  ///< of all ranks
  MPI_Request announced = MPI_REQUEST_NULL;
};

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
