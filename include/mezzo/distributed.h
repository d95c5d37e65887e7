/// \file
/// Training on several ranks, but what needs MPI, Gloo's headers or NCCL: include mpi_backend.h and
/// mpi_rendezvous.h (link mezzo::mpi), gloo_backend.h (link mezzo::gloo) or nccl_backend.h (link
/// mezzo::nccl) by name.
#pragma once

#include <mezzo/distributed/broadcast_parameters.h>       // IWYU pragma: export
#include <mezzo/distributed/checkpoint_manager.h>         // IWYU pragma: export
#include <mezzo/distributed/data_parallel.h>              // IWYU pragma: export
#include <mezzo/distributed/grad_all_reduce.h>            // IWYU pragma: export
#include <mezzo/distributed/grad_buckets.h>               // IWYU pragma: export
#include <mezzo/distributed/process_group_environment.h>  // IWYU pragma: export
#include <mezzo/distributed/reduce_scatter_float.h>       // IWYU pragma: export
#include <mezzo/distributed/rendezvous.h>                 // IWYU pragma: export
#include <mezzo/distributed/sharded_optimizer.h>          // IWYU pragma: export
#include <mezzo/distributed/sync_batch_norm.h>            // IWYU pragma: export
#include <mezzo/distributed/watchdog.h>                   // IWYU pragma: export
#include <mezzo/distributed/watchdog_options.h>           // IWYU pragma: export
