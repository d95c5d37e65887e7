// Checkpoints, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/checkpoint/checkpoint.h>

// What their users leave to this.
#include <mezzo/checkpoint/detail/checkpoint_impl.h>
