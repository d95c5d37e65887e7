// Muon, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/optim/muon.h>

// What its users leave to this.
#include <mezzo/optim/detail/muon_impl.h>
