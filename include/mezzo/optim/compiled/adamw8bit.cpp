// AdamW8bit, compiled once: see mezzo/optim/compiled.h.
#include <mezzo/optim/adamw8bit.h>

// What its users leave to this.
#include <mezzo/optim/detail/adamw8bit_impl.h>
