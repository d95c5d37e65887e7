// MasterWeights, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/optim/master_weights.h>

// What their users leave to this.
#include <mezzo/optim/detail/master_weights_impl.h>
