/// Fixture of the code blocks in docs/debugging.md. See debugging_page.py.
#pragma once

#include <mezzo/checkpoint.h>
#include <mezzo/diagnostics.h>
#include <mezzo/optim/adamw.h>
#include <mezzo/scaling/grad_scaler.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <vector>

#include "../support/temp_dir.h"

/// A classifier with three batches, and a temporary working directory.
class DebuggingPage : public testing::Test {
 protected:
  struct Batch {
    torch::Tensor x, y;
  };

  DebuggingPage() {
    torch::manual_seed(0);
    for (int i = 0; i < 3; ++i) {
      const torch::Tensor x = torch::randn({16, 8});
      batches.push_back({x, x.slice(1, 0, 4).argmax(1)});
    }
    std::filesystem::current_path(temp_dir.path());
  }
  ~DebuggingPage() override { std::filesystem::current_path(before); }

  std::filesystem::path before = std::filesystem::current_path();
  test_support::TempDir temp_dir;
  torch::nn::Sequential model{torch::nn::Linear(8, 16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 4)};
  mezzo::optim::AdamW optimizer{model->parameters()};
  mezzo::GradScaler scaler;
  torch::nn::CrossEntropyLoss criterion;
  std::vector<Batch> batches;
  torch::nn::Linear net_g{4, 8}, net_d{8, 1};  // for blocks with two models
};
