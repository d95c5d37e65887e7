// The functions of all rooms that units with MEZZO_COMPILED_LIB leave to this one: see
// mezzo/optim/compiled.h. In one unit, since libtorch's headers are most of what each costs.
#include <mezzo/autocast/op_overrides.h>
#include <mezzo/checkpoint/checkpoint.h>
#include <mezzo/optim/detail/fused_optimizer_base.h>
#include <mezzo/optim/master_weights.h>
#include <mezzo/scaling/grad_scaler.h>

// Their definitions.
#include <mezzo/autocast/detail/autocast_op_list_inl.h>
#include <mezzo/autocast/detail/op_overrides_inl.h>
#include <mezzo/checkpoint/detail/checkpoint_inl.h>
#include <mezzo/optim/detail/fused_optimizer_base_inl.h>
#include <mezzo/optim/detail/master_weights_inl.h>
#include <mezzo/scaling/detail/grad_scaler_inl.h>
