// The loops over gradients, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/kernels/gradient_summary_loops.h>
#include <mezzo/kernels/unscale.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_COMPILED_SUMMARIES()
MEZZO_COMPILED_UNSCALES()

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
