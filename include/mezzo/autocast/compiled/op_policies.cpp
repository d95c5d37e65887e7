// Op policies, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/autocast/op_policy.h>

// The definitions that their users leave to this unit.
#include <mezzo/autocast/detail/op_policy/op_policy_impl.h>
