#include <torch/torch.h>
//
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mezzo/distributed/communicator.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using mezzo::AnyCommunicator;
using mezzo::Reduction;
using mezzo::Work;

/// Writes down what is asked of it.
struct Recorded : mezzo::detail::PendingCollective {
  Recorded(std::vector<std::string>& to, std::string of) : log(to), collective(std::move(of)) {}
  bool ready() override {
    log.push_back("ready");
    return false;
  }
  void wait() override { log.push_back("wait"); }
  std::string name() const override { return collective; }
  std::vector<std::string>& log;
  std::string collective;
};

class Recorder {
 public:
  explicit Recorder(std::vector<std::string>& log) : log_(&log) {}
  int rank() const { return 2; }
  int size() const { return 5; }
  bool serves(c10::DeviceType device) const { return device == at::kCPU; }
  Work all_reduce(const at::Tensor& /*tensor*/, Reduction reduction) {
    return record(reduction == Reduction::sum ? "all_reduce sum" : "all_reduce max");
  }
  Work broadcast(const at::Tensor& /*tensor*/, int root) {
    return record("broadcast " + std::to_string(root));
  }
  Work all_gather(const at::Tensor& /*output*/, const at::Tensor& /*input*/) {
    return record("all_gather");
  }
  Work reduce_scatter(const at::Tensor& /*output*/, const at::Tensor& /*input*/,
                      Reduction /*reduction*/) {
    return record("reduce_scatter");
  }
  Work barrier() { return record("barrier"); }

 private:
  Work record(std::string what) {
    log_->push_back(what);
    return Work(std::make_unique<Recorded>(*log_, std::move(what)));
  }
  std::vector<std::string>* log_;
};

static_assert(mezzo::Communicator<Recorder>);
static_assert(mezzo::Communicator<AnyCommunicator>);
static_assert(!mezzo::Communicator<std::string>);

class Warnings : public c10::WarningHandler {
 public:
  explicit Warnings(bool throws = false) : throws_(throws), guard_(this) {}
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
    if (throws_) throw std::runtime_error("a handler that throws");
  }
  std::vector<std::string> texts;

 private:
  bool throws_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

TEST(AnyCommunicator, PassesEveryCallOn) {
  std::vector<std::string> log;
  AnyCommunicator any = Recorder(log);
  const at::Tensor tensor = at::zeros({1});
  EXPECT_EQ(any.rank(), 2);
  EXPECT_EQ(any.size(), 5);
  EXPECT_TRUE(any.serves(at::kCPU));
  EXPECT_FALSE(any.serves(at::kCUDA));
  any.all_reduce(tensor, Reduction::max).wait();
  any.broadcast(tensor, 3).wait();
  AnyCommunicator copy = any;
  copy.all_gather(tensor, tensor).wait();
  copy.reduce_scatter(tensor, tensor, Reduction::sum).wait();
  copy.barrier().wait();
  EXPECT_THAT(log,
              testing::ElementsAre("all_reduce max", "wait", "broadcast 3", "wait", "all_gather",
                                   "wait", "reduce_scatter", "wait", "barrier", "wait"));
}

TEST(Work, WaitsOnceWhoeverHoldsIt) {
  std::vector<std::string> log;
  const Warnings warnings;
  Work request = Recorder(log).barrier();
  Work holder = std::move(request);
  EXPECT_FALSE(holder.ready());
  holder.wait();
  holder.wait();
  EXPECT_TRUE(holder.ready());
  EXPECT_THAT(log, testing::ElementsAre("barrier", "ready", "wait"));
  EXPECT_TRUE(warnings.texts.empty());
  Work().wait();
}

TEST(Work, ThatNobodyWaitedForWarnsAndNeverThrows) {
  std::vector<std::string> log;
  const Warnings warnings(/*throws=*/true);
  { const Work forgotten = Recorder(log).broadcast(at::zeros({1}), 4); }
  Work abandoned = Recorder(log).barrier();
  abandoned.abandon();
  Work replaced = Recorder(log).barrier();
  replaced = Work();
  EXPECT_THAT(warnings.texts,
              testing::ElementsAre(testing::HasSubstr("nobody waited for broadcast 4"),
                                   testing::HasSubstr("nobody waited for barrier")));
}

}  // namespace
