/// \file
/// Distributed training. Headers with more dependencies are included by name: mpi_backend.h (target
/// mezzo::mpi) and gloo_backend.h (target mezzo::gloo).
#pragma once

#include <mezzo/distributed/broadcast_parameters.h>       // IWYU pragma: export
#include <mezzo/distributed/check_equal_on_all_ranks.h>   // IWYU pragma: export
#include <mezzo/distributed/checkpoint_manager.h>         // IWYU pragma: export
#include <mezzo/distributed/distributed_data_parallel.h>  // IWYU pragma: export
#include <mezzo/distributed/distributed_environment.h>    // IWYU pragma: export
#include <mezzo/distributed/grad_reducer.h>               // IWYU pragma: export
#include <mezzo/distributed/model_parallel_optimizer.h>   // IWYU pragma: export
#include <mezzo/distributed/no_sync_guard.h>              // IWYU pragma: export
#include <mezzo/distributed/rendezvous.h>                 // IWYU pragma: export
#include <mezzo/distributed/sharded_optimizer.h>          // IWYU pragma: export
#include <mezzo/distributed/sync_batch_norm.h>            // IWYU pragma: export
