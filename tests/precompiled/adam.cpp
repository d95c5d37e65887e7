#include "compiled_once.h"

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_COMPILED_ONCE_ADAM()

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
