// ZeRO-1: each process keeps the optimizer's state for its part of the weights only.
//
//     mpirun -np 2 ./zero1
//
// Exits with 1 if the loss did not fall, or if a process keeps more than its part.
#include <mezzo/distributed/mpi_backend.h>
#include <mezzo/distributed/sharded_optimizer.h>
#include <mezzo/mezzo.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  const mezzo::MpiEnvironment mpi;
  const auto world = c10::make_intrusive<mezzo::MpiBackend>(MPI_COMM_WORLD);

  torch::manual_seed(0);  // all ranks draw the same data
  const auto teacher = torch::randn({16, 4});
  torch::nn::Sequential model(torch::nn::Linear(16, 256), torch::nn::GELU(),
                              torch::nn::Linear(256, 4));
  mezzo::ShardedOptimizer<mezzo::optim::AdamW> optimizer(model->parameters(), world,
                                                         mezzo::optim::AdamWOptions(1e-2));
  mezzo::GradScaler scaler;

  torch::Tensor first_loss, loss;
  for (int step = 0; step < 60; ++step) {
    const auto batch = torch::randn({64, 16});
    const auto input =
        batch.tensor_split(world->getSize())[static_cast<std::size_t>(world->getRank())];
    optimizer.zero_grad();
    loss = mezzo::autocast({.device = torch::kCPU}, [&] {
      return torch::nn::functional::cross_entropy(model->forward(input),
                                                  input.mm(teacher).argmax(1));
    });
    if (step == 0) first_loss = loss.detach();
    scaler.scale(loss).backward();  // sums each bucket as it fills
    scaler.step(optimizer,
                {.max_norm = 1.0});  // a rank steps its part and receives the rest; or all skip
    scaler.update();
  }

  const auto bytes = optimizer.bytes();
  const double before = first_loss.item<double>(), after = loss.item<double>();
  std::printf("rank %d of %d: loss %.3f -> %.3f, %lld bytes of state for %lld bytes of weights\n",
              world->getRank(), world->getSize(), before, after,
              static_cast<long long>(bytes.state), static_cast<long long>(bytes.weights));
  // Two moments, shared by the ranks; padding adds some.
  const bool is_shared = bytes.state <= 2 * bytes.weights / world->getSize() + 4096;
  return is_shared && after < before / 2 ? 0 : 1;
}
