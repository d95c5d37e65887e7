/// \file
/// Training on several ranks, but what needs MPI or Gloo's headers: include mpi_backend.h (link
/// mezzo::mpi) or gloo_backend.h (link mezzo::gloo) by name.
#pragma once

#include <mezzo/distributed/broadcast_parameters.h>       // IWYU pragma: export
#include <mezzo/distributed/checkpoint_manager.h>         // IWYU pragma: export
#include <mezzo/distributed/distributed_data_parallel.h>  // IWYU pragma: export
#include <mezzo/distributed/grad_reducer.h>               // IWYU pragma: export
#include <mezzo/distributed/rendezvous.h>                 // IWYU pragma: export
#include <mezzo/distributed/sharded_optimizer.h>          // IWYU pragma: export
#include <mezzo/distributed/sync_batch_norm.h>            // IWYU pragma: export
