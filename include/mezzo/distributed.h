/// \file
/// Training on several ranks, but what needs MPI or NCCL: include mpi_communicator.h and
/// mpi_rendezvous.h (link mezzo::mpi) or nccl_communicator.h (link mezzo::nccl) by name.
#pragma once

#include <mezzo/distributed/broadcast_parameters.h>       // IWYU pragma: export
#include <mezzo/distributed/c10d_communicator.h>          // IWYU pragma: export
#include <mezzo/distributed/checkpoint_manager.h>         // IWYU pragma: export
#include <mezzo/distributed/communicator.h>               // IWYU pragma: export
#include <mezzo/distributed/data_parallel.h>              // IWYU pragma: export
#include <mezzo/distributed/grad_all_reduce.h>            // IWYU pragma: export
#include <mezzo/distributed/grad_buckets.h>               // IWYU pragma: export
#include <mezzo/distributed/process_group_environment.h>  // IWYU pragma: export
#include <mezzo/distributed/sharded_optimizer.h>          // IWYU pragma: export
#include <mezzo/distributed/sync_batch_norm.h>            // IWYU pragma: export
#include <mezzo/distributed/watchdog.h>                   // IWYU pragma: export
#include <mezzo/distributed/watchdog_options.h>           // IWYU pragma: export
#include <mezzo/distributed/work.h>                       // IWYU pragma: export
