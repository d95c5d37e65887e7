// The kernels and optimizers of mezzo::compiled, instantiated once; see mezzo/optim/compiled.h.
#include <mezzo/kernels/grad_stats_cpu.h>
#include <mezzo/kernels/unscale.h>
#include <mezzo/optim/compiled.h>

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_COMPILED_GRAD_STATS_KERNELS()
MEZZO_COMPILED_UNSCALE_KERNELS()
MEZZO_COMPILED_OPTIMIZERS()

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
