// What one rank does of a job in which one rank goes wrong: watchdog_program WHAT VICTIM, or
// unwatched_WHAT without a watchdog. Started by watchdog_faults_test.cpp under mpirun.
#include <torch/torch.h>
//
#include <mezzo/distributed/rendezvous.h>
#include <mezzo/distributed/watchdog.h>

#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>

#include "ranks.h"

namespace {

using distributed_test::all_reduce;
using distributed_test::everyone;
using distributed_test::Ranks;
using distributed_test::ReduceOp;

using namespace std::chrono_literals;

void go_wrong(const std::string& what) {
  std::cerr << "rank goes wrong: " + what + '\n' << std::flush;
  if (what == "kill") raise(SIGKILL);
  if (what == "stop") raise(SIGSTOP);
  if (what == "hang") std::this_thread::sleep_for(1h);
  if (what == "throw") throw std::runtime_error("the disk is full");
  if (what == "exit") std::_Exit(0);
  if (what == "slow") std::this_thread::sleep_for(2500ms);
}

void train(Ranks world, const std::string& what, int victim) {
  for (int step = 0; step < 8; ++step) {
    if (step == 5 && world->getRank() == victim) go_wrong(what);
    if (step == 5 && what == "compute") std::this_thread::sleep_for(4s);
    if (step == 5 && what == "leave" && world->getRank() == victim) {
      std::cerr << "rank goes wrong: leave\n" << std::flush;
      return;
    }
    const at::Tensor gradient = at::ones({64});
    all_reduce(world, gradient, ReduceOp::SUM);
  }
}

/// Whatever a rank throws is caught, as by a program that goes on to save its logs.
int run_unwatched(const std::string& what, int victim) {
  const mezzo::MpiEnvironment mpi;
  const Ranks world = everyone();
  try {
    train(world, what, victim);
  } catch (const std::exception& error) {
    std::cerr << std::string("caught: ") + error.what() + '\n' << std::flush;
  }
  return 0;
}

int run(const std::string& what, int victim) {
  const mezzo::MpiEnvironment mpi;
  const auto environment = mezzo::ProcessGroupEnvironment::read();
  mezzo::Watchdog watchdog(mezzo::rendezvous(environment, 60s), environment.rank,
                           environment.world_size,
                           {.interval = 200ms,
                            .heartbeat_timeout = 2s,
                            .collective_timeout = what == "slow" ? 20000ms : 2200ms});
  auto world = watchdog.watch(everyone());
  watchdog.run([&] { train(world, what, victim); });
  std::cerr << "rank " << environment.rank << " is done" << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: watchdog_program WHAT VICTIM\n";
    return 2;
  }
  try {
    const std::string what = argv[1], unwatched = "unwatched_";
    if (!what.starts_with(unwatched)) return run(what, std::atoi(argv[2]));
    return run_unwatched(what.substr(unwatched.size()), std::atoi(argv[2]));
  } catch (const std::exception& error) {
    std::cerr << "caught: " << error.what() << std::endl;
    return 1;
  }
}
