// GradScaler, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/scaling/grad_scaler.h>

// What their users leave to this.
#include <mezzo/scaling/detail/grad_scaler_impl.h>
