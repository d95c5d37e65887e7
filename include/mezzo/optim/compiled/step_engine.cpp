// The engine of mezzo's optimizers, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/optim/detail/step_engine.h>

// What their users leave to this.
#include <mezzo/optim/detail/step_engine_impl.h>
