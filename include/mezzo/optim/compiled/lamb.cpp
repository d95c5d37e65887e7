// LAMB, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/optim/lamb.h>

// What its users leave to this.
#include <mezzo/optim/detail/lamb_impl.h>
