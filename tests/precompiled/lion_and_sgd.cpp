#include "compiled_once.h"

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_COMPILED_ONCE_LION_AND_SGD()

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
