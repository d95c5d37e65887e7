#include <mezzo/optim/compiled.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_COMPILED_LION_AND_SGD()

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
