// GradScaler, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/scaling/grad_scaler.h>

// The definitions that units with MEZZO_LEFT_TO_LIBRARY leave to this one.
#include <mezzo/scaling/detail/grad_scaler_impl.h>
