/// \file
/// The arguments of an op as at::RecordFunction carries them into a start callback.
#pragma once

#include <ATen/record_function.h>
#include <mezzo/base/version.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

using RecordedInputs = c10::ArrayRef<const c10::IValue>;

RecordedInputs recorded_inputs(const at::RecordFunction& function);

// RecordFunction::inputs() asserts, in units compiled without NDEBUG, a flag that only a libtorch
// compiled without NDEBUG ever sets: it throws in every debug build against a release libtorch. An
// explicit instantiation may name a private member, so this reads the member without asking.
template <RecordedInputs at::RecordFunction::*Member>
struct ReadRecordedInputs {
  friend RecordedInputs recorded_inputs(const at::RecordFunction& function) {
    return function.*Member;
  }
};
template struct ReadRecordedInputs<&at::RecordFunction::inputs_>;

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
