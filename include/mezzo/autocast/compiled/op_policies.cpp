// Op policies and cast traces, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/autocast/cast_trace.h>
#include <mezzo/autocast/op_policy.h>

// The definitions that their users leave to this unit.
#include <mezzo/autocast/detail/op_policy/cast_trace_impl.h>
#include <mezzo/autocast/detail/op_policy/op_policy_impl.h>
