#include <mezzo/optim/compiled.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_COMPILED_LAMB()

}  // namespace detail

MEZZO_COMPILED_LAMB_MEMBERS()

}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
