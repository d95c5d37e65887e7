// One rank of a run over Gloo that is killed and restarted: restart_program ddp|zero DIRECTORY
// STEPS. Started by torchrun_restart_test.cpp under torchrun, or by multi_node_test.py. Resumes
// from the last checkpoint in DIRECTORY, and logs its progress to stdout.
#include <torch/torch.h>
//
#include <mezzo/distributed/checkpoint_manager.h>
#include <mezzo/distributed/distributed_data_parallel.h>
#include <mezzo/distributed/gloo_backend.h>
#include <mezzo/distributed/rendezvous.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

namespace {

using namespace std::chrono_literals;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;

constexpr int64_t kStepsBetweenFiles = 3;

void say(const std::string& line) { std::cout << line + '\n' << std::flush; }

/// Large enough that saving takes a considerable part of the time.
torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(32, 512), torch::nn::Dropout(0.3),
                               torch::nn::Tanh(), torch::nn::Linear(512, 64));
}

std::string digest_of(const std::vector<at::Tensor>& tensors) {
  std::string bytes;
  for (const at::Tensor& tensor : tensors) {
    bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return mezzo::detail::crc32c_hex(bytes.data(), bytes.size());
}

/// Trains with either DistributedDataParallel or ShardedOptimizer.
template <class Forward>
void train(BackendPtr world, const std::filesystem::path& directory, int64_t steps,
           torch::nn::Sequential model, torch::optim::Optimizer& optimizer,
           const Forward& forward) {
  mezzo::GradScaler scaler({.init_scale = 64, .growth_interval = 10});
  int64_t step = 0;
  mezzo::TrainingState state;
  state.add("model", model).add("optimizer", optimizer).add("scaler", scaler);
  std::vector<at::Tensor> own{at::zeros({1'200'000})};  // 4.8 MB
  state.add("step", step).add_per_rank("own", own).add_rng_state();
  torch::manual_seed(static_cast<uint64_t>(100 + world->getRank()));

  mezzo::DistributedCheckpointManager checkpoints(directory, world);
  checkpoints.load_latest(state);
  if (world->getRank() == 0) say("from " + std::to_string(step));
  while (step < steps) {
    optimizer.zero_grad();
    scaler.scale(forward(torch::randn({8, 32})).square().mean()).backward();
    scaler.step(optimizer, {.max_norm = 1.0});
    scaler.update();
    ++step;
    own[0].add_(static_cast<double>(step * (world->getRank() + 1)));
    if (world->getRank() == 0) say("did " + std::to_string(step));
    if (step % kStepsBetweenFiles == 0 || step == steps) {
      if (world->getRank() == 0) say("saving " + std::to_string(step));
      checkpoints.save(state, step);
      if (world->getRank() == 0) say("saved " + std::to_string(step));
    }
  }
  own.push_back(torch::rand({3}));
  say("end " + digest_of(model->parameters()));
  say("own " + std::to_string(world->getRank()) + ' ' + digest_of(own));
}

int run(const std::string& mode, const std::filesystem::path& directory, int64_t steps) {
  const auto environment = mezzo::DistributedEnvironment::from_env();
  const BackendPtr world = mezzo::make_gloo_backend(mezzo::rendezvous_store(environment, 60s),
                                                    environment.rank, environment.world_size, 30s);
  const torch::nn::Sequential model = make_model();
  if (mode == "zero") {
    mezzo::ShardedOptimizer<AdamW> optimizer(model->parameters(), world, AdamWOptions(1e-3));
    train(world, directory, steps, model, optimizer, [&](const at::Tensor& x) {
      return at::Tensor(torch::nn::Sequential(model)->forward(x));
    });
  } else {
    mezzo::DistributedDataParallel ddp(model, world);
    AdamW optimizer(model->parameters(), AdamWOptions(1e-3));
    train(world, directory, steps, model, optimizer, [&](const at::Tensor& x) { return ddp(x); });
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: restart_program ddp|zero DIRECTORY STEPS\n";
    return 2;
  }
  at::set_num_threads(1);
  const char* const rank = std::getenv("RANK");
  say("rank " + std::string(rank == nullptr ? "?" : rank) + " is " + std::to_string(::getpid()));
  try {
    return run(argv[1], argv[2], std::atoll(argv[3]));
  } catch (const std::exception& error) {
    std::cerr << "caught: " << error.what() << std::endl;
    return 1;
  }
}
