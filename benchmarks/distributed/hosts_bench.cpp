// A training step over Gloo on the CPU, for ranks on several hosts: `scale.py --hosts hosts_bench`
// starts them. Rank 0 prints the bytes of the gradients, and the median milliseconds of a step
// without communication, with DataParallel and with ZeRO-1.
#include <torch/torch.h>
//
#include <mezzo/distributed/data_parallel.h>
#include <mezzo/distributed/gloo_backend.h>
#include <mezzo/distributed/rendezvous.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using mezzo::optim::AdamW;
using mezzo::optim::AdamWOptions;

torch::nn::Sequential make_model() {
  torch::nn::Sequential model;
  for (int layer = 0; layer < 4; ++layer) model->push_back(torch::nn::Linear(1024, 1024));
  return model;
}

double median_ms(const c10::intrusive_ptr<c10d::Backend>& world,
                 const std::function<void()>& step) {
  std::vector<double> times;
  for (int round = 0; round < 8; ++round) {
    world->barrier()->wait();
    const auto begin = Clock::now();
    step();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  std::sort(times.begin() + 1, times.end());  // the first one allocates
  return times[4];
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const auto environment = mezzo::ProcessGroupEnvironment::read();
  const c10::intrusive_ptr<c10d::Backend> world =
      mezzo::gloo_backend(mezzo::rendezvous(environment), environment.rank, environment.world_size);
  const at::Tensor input = torch::randn({8, 1024});
  const auto train = [&](torch::nn::Sequential& model, torch::optim::Optimizer& optimizer) {
    optimizer.zero_grad();
    model->forward(input).square().mean().backward();
    optimizer.step();
  };
  double bytes = 0, alone = 0, ddp = 0;
  {
    torch::nn::Sequential model = make_model();
    for (const at::Tensor& parameter : model->parameters()) {
      bytes += static_cast<double>(parameter.nbytes());
    }
    AdamW optimizer(model->parameters(), AdamWOptions(1e-4));
    alone = median_ms(world, [&] { train(model, optimizer); });
  }
  {
    torch::nn::Sequential model = make_model();
    const mezzo::DataParallel parallel(model, world);
    AdamW optimizer(model->parameters(), AdamWOptions(1e-4));
    ddp = median_ms(world, [&] { train(model, optimizer); });
  }
  torch::nn::Sequential model = make_model();
  mezzo::ShardedOptimizer<AdamW> optimizer(model->parameters(), world, AdamWOptions(1e-4));
  const double zero = median_ms(world, [&] { train(model, optimizer); });
  if (environment.rank == 0) std::printf("measured %.0f %.2f %.2f %.2f\n", bytes, alone, ddp, zero);
  world->barrier()->wait();
}
