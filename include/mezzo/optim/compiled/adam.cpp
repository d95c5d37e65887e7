#include <mezzo/optim/compiled.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_COMPILED_ADAM()

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
