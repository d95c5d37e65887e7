// The source of mezzo::compiled: functions that translation units with MEZZO_COMPILED_LIB do not
// compile (mezzo/optim/compiled.h). One file, since libtorch's headers are most of the cost of
// each.
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

// Definitions.
#include <mezzo/autocast/detail/autocast_op_list_inl.h>
#include <mezzo/autocast/detail/op_overrides_inl.h>
#include <mezzo/checkpoint/detail/checkpoint_inl.h>
#include <mezzo/optim/detail/fused_optimizer_base_inl.h>
#include <mezzo/optim/detail/master_weights_inl.h>
#include <mezzo/scaling/detail/grad_scaler_inl.h>
