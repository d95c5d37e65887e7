#include <mezzo/autocast/autocast.h>
#include <mezzo/autocast/op_policy.h>
#include <mezzo/diagnose/cast_trace.h>

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace {

using mezzo::Autocast;
using mezzo::CastRecord;
using mezzo::CastTrace;
using mezzo::OpPolicy;
using testing::HasSubstr;
using torch::kBFloat16;
using torch::kCPU;
using torch::kFloat;

torch::Tensor square(at::ScalarType dtype = kFloat) { return torch::ones({4, 4}, dtype); }

const CastRecord* find(const std::vector<CastRecord>& records, const std::string& op) {
  const auto found = std::find_if(records.begin(), records.end(),
                                  [&op](const CastRecord& record) { return record.op == op; });
  return found == records.end() ? nullptr : &*found;
}

// Ops that autocast does not list on the CPU and that are made of products, which it does.
struct MadeOfProducts {
  const char* op;
  std::function<torch::Tensor()> call;
};

const std::vector<MadeOfProducts>& made_of_products() {
  static const std::vector<MadeOfProducts> all = {
      {"aten::einsum",
       [] {
         return torch::einsum("ij,jk->ik", {square(), square()});
       }},
      {"aten::inner", [] { return torch::inner(square(), square()); }},
      {"aten::tensordot", [] { return torch::tensordot(square(), square(), {1}, {0}); }},
      {"aten::linalg_multi_dot",
       [] {
         return torch::linalg_multi_dot({square(), square()});
       }},
      {"aten::chain_matmul", [] {
         return torch::chain_matmul({square(), square()});
       }}};
  return all;
}

TEST(CastTrace, TellsTheDtypeOfTheProductsThatAnUnlistedOpIsMadeOf) {
  for (const auto& [op, call] : made_of_products()) {
    CastTrace trace;
    const Autocast<kCPU> autocast;
    call();
    const auto records = trace.records();
    ASSERT_NE(find(records, op), nullptr) << op;
    EXPECT_EQ(find(records, op)->runs_in, kBFloat16) << op;
    EXPECT_EQ(find(records, op)->calls, 1) << op;
  }
  CastTrace trace;
  const Autocast<kCPU> autocast;
  torch::einsum("ij->i", {square()});
  EXPECT_EQ(find(trace.records(), "aten::einsum")->runs_in, kFloat);
}

TEST(CastTrace, CountsCallsCastsAndTheBytesTheyMoved) {
  CastTrace trace;
  const torch::NoGradGuard no_grad;
  const Autocast<kCPU> autocast;
  torch::mm(square(), square(kBFloat16));
  torch::mm(square(), square(kBFloat16));
  const auto records = trace.records();
  const auto* mm = find(records, "aten::mm");
  ASSERT_NE(mm, nullptr);
  EXPECT_EQ(mm->calls, 2);
  EXPECT_EQ(mm->casts, 2);
  EXPECT_EQ(mm->bytes, 2 * 16 * (4 + 2));  // float32 read, bfloat16 written
  EXPECT_EQ(mm->inputs, (std::vector<at::ScalarType>{kFloat, kBFloat16}));
  EXPECT_EQ(mm->runs_in, kBFloat16);
  EXPECT_EQ(trace.total_bytes(), mm->bytes);
}

TEST(CastTrace, DoesNotCountCastsThatLibtorchsCacheSaved) {
  const auto weight = torch::ones({4, 4}, torch::requires_grad());
  CastTrace trace;
  const Autocast<kCPU> autocast;
  for (int i = 0; i < 3; ++i) {
    torch::mm(square(kBFloat16), weight);
  }
  const auto records = trace.records();
  EXPECT_EQ(find(records, "aten::mm")->calls, 3);
  EXPECT_EQ(find(records, "aten::mm")->casts, 1);
}

TEST(CastTrace, TellsModulesPoliciesAndUnlistedOps) {
  const auto policy = mezzo::install_op_overrides(OpPolicy().deny("relu"));
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::ReLU(), torch::nn::Sigmoid());
  CastTrace trace(*model), nameless;
  const Autocast<kCPU> autocast({.policy = policy});
  model->forward(square());
  const auto records = trace.records();
  EXPECT_EQ(find(records, "aten::addmm")->module, "0");
  EXPECT_EQ(find(records, "aten::addmm")->casts, 3);
  EXPECT_EQ(find(records, "aten::relu")->module, "0") << "that of the op before";
  EXPECT_EQ(find(records, "aten::relu")->runs_in, kFloat);
  EXPECT_EQ(find(records, "aten::sigmoid")->casts, 0);
  EXPECT_EQ(find(nameless.records(), "aten::addmm")->module, "");
}

TEST(CastTrace, CountsNoCopyThatTheOpItselfMakes) {
  CastTrace trace;
  const Autocast<kCPU> autocast;
  const auto lengths = torch::full({1}, 4, torch::kInt);  // which ctc_loss casts to long
  torch::ctc_loss(torch::zeros({4, 1, 4}), torch::ones({1, 2}, torch::kLong), lengths,
                  torch::full({1}, 2, torch::kInt));
  square().to(kBFloat16);  // the user's cast, not autocast's
  EXPECT_EQ(trace.total_bytes(), 0);
}

TEST(CastTrace, SortsByBytesAndPrintsATable) {
  CastTrace trace;
  const Autocast<kCPU> autocast;
  torch::mm(square(), square());
  const auto big = torch::ones({64, 64});
  torch::addmm(big, big, big);
  EXPECT_EQ(trace.records().front().op, "aten::addmm");
  std::ostringstream text;
  text << trace;
  EXPECT_THAT(text.str(), testing::ContainsRegex(
                              "73728 +3 +1  aten::addmm \\(Float, Float, Float\\) -> BFloat16\n"));
  EXPECT_THAT(text.str(), HasSubstr("total: 73920 bytes in casts"));
}

TEST(CastTrace, HearsNothingOutsideItsLifeOrOfAutocastThatIsOff) {
  const Autocast<kCPU> autocast;
  torch::mm(square(), square());
  {
    CastTrace trace;
    const Autocast<kCPU> disabled({.enabled = false});
    torch::mm(square(), square());
    EXPECT_TRUE(trace.records().empty());
  }
  EXPECT_FALSE(at::hasCallbacks());
}

TEST(CastTrace, SurvivesAnOpThatThrows) {
  CastTrace trace;
  const Autocast<kCPU> autocast;
  EXPECT_THROW(torch::mm(square(), torch::ones({3, 3})), c10::Error);
  torch::sigmoid(square());
  const auto records = trace.records();
  EXPECT_NE(find(records, "aten::sigmoid"), nullptr);
}

torch::Tensor twice(const torch::Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("mezzo_trace_test::twice", "")
      .typed<torch::Tensor(const torch::Tensor&)>()
      .call(x);
}

TEST(CastTrace, NotesTheOpOfAnotherLibraryThatHasAnAutocastKernel) {
  auto library =
      torch::Library(torch::Library::DEF, "mezzo_trace_test", std::nullopt, __FILE__, __LINE__);
  library.def("twice(Tensor x) -> Tensor");
  auto kernels = torch::Library(torch::Library::IMPL, "mezzo_trace_test", c10::DispatchKey::CPU,
                                __FILE__, __LINE__);
  kernels.impl("twice", [](const torch::Tensor& x) { return x + x; });
  auto lowering = torch::Library(torch::Library::IMPL, "mezzo_trace_test",
                                 c10::DispatchKey::AutocastCPU, __FILE__, __LINE__);
  lowering.impl("twice", [](const torch::Tensor& x) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
    return twice(x.to(at::autocast::get_autocast_dtype(kCPU)));
  });
  const auto x = square();
  const Autocast<kCPU> autocast;
  const CastTrace trace;
  twice(x);
  const auto records = trace.records();
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].op, "mezzo_trace_test::twice");
  EXPECT_EQ(records[0].runs_in, kBFloat16);
  EXPECT_EQ(records[0].casts, 1);
}

}  // namespace
