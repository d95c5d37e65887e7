#include <torch/torch.h>

#include "optimizers.h"

namespace mezzo::inline MEZZO_ABI_NAMESPACE {
namespace detail {

MEZZO_TEST_OPTIMIZERS()

}  // namespace detail
}  // namespace mezzo::inline MEZZO_ABI_NAMESPACE
