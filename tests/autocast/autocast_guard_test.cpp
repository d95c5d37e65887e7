#include <mezzo/autocast/autocast_guard.h>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <sstream>
#include <type_traits>

#include "get_product_dtype.h"

namespace {

using mezzo::AutocastGuard;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// The thread state that a guard may change.
struct ThreadState {
  bool cpu = at::autocast::is_autocast_enabled(torch::kCPU);
  bool cuda = at::autocast::is_autocast_enabled(torch::kCUDA);
  torch::ScalarType cpu_dtype = at::autocast::get_autocast_dtype(torch::kCPU);
  torch::ScalarType cuda_dtype = at::autocast::get_autocast_dtype(torch::kCUDA);
  bool cache = at::autocast::is_autocast_cache_enabled();
  int nesting = read_nesting();

  static int read_nesting() {
    at::autocast::increment_nesting();
    return at::autocast::decrement_nesting();
  }
  bool operator==(const ThreadState&) const = default;
};

static_assert(!std::is_copy_constructible_v<AutocastGuard<torch::kCPU>>);
static_assert(!std::is_move_constructible_v<AutocastGuard<torch::kCPU>>);
static_assert(!std::is_copy_assignable_v<AutocastGuard<torch::kCPU>>);
static_assert(!std::is_move_assignable_v<AutocastGuard<torch::kCPU>>);
static_assert(std::is_nothrow_destructible_v<AutocastGuard<torch::kCPU>>);
static_assert(
    std::is_same_v<AutocastGuard<torch::kCUDA>, AutocastGuard<torch::kCUDA, torch::kHalf>>);
static_assert(
    std::is_same_v<AutocastGuard<torch::kCPU>, AutocastGuard<torch::kCPU, torch::kBFloat16>>);

TEST(AutocastGuard, CastsToDefaultDtypeInScope) {
  {
    const AutocastGuard<torch::kCPU> autocast;
    EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
  }
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
}

TEST(AutocastGuard, CudaDefaultsToFloat16ExcludingCpu) {
  const AutocastGuard<torch::kCUDA> autocast;
  EXPECT_TRUE(at::autocast::is_autocast_enabled(torch::kCUDA));
  EXPECT_EQ(at::autocast::get_autocast_dtype(torch::kCUDA), torch::kHalf);
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
}

TEST(AutocastGuard, NestingRestoresEnclosingRegion) {
  const ThreadState before;
  {
    const AutocastGuard<torch::kCPU> outer;
    const ThreadState outer_state;
    {
      const AutocastGuard<torch::kCPU, torch::kHalf> inner({.cache_enabled = false});
      EXPECT_EQ(get_product_dtype(), torch::kHalf);
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
      EXPECT_EQ(ThreadState::read_nesting(), before.nesting + 2);
    }
    EXPECT_EQ(ThreadState(), outer_state);
    EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
  }
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, DisabledRunsFullPrecisionInsideRegion) {
  const AutocastGuard<torch::kCPU> outer;
  {
    const AutocastGuard<torch::kCPU> exact({.enabled = false});
    EXPECT_EQ(get_product_dtype(), torch::kFloat);
    {
      const AutocastGuard<torch::kCPU> again;
      EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
    }
    EXPECT_EQ(get_product_dtype(), torch::kFloat);
  }
  EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
}

TEST(AutocastGuard, ExceptionRestoresPreviousState) {
  const ThreadState before;
  const auto mismatched = [] {
    const AutocastGuard<torch::kCPU, torch::kHalf> autocast({.cache_enabled = false});
    torch::mm(torch::ones({2, 3}), torch::ones({2, 3}));
  };
  EXPECT_THROW(mismatched(), c10::Error);
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, RestoresManuallySetState) {
  at::autocast::set_autocast_enabled(torch::kCPU, true);
  at::autocast::set_autocast_dtype(torch::kCPU, torch::kHalf);
  at::autocast::set_autocast_cache_enabled(false);
  const ThreadState manual_state;
  { const AutocastGuard<torch::kCPU> autocast({.enabled = false}); }
  EXPECT_EQ(ThreadState(), manual_state);
  at::autocast::set_autocast_enabled(torch::kCPU, false);
  at::autocast::set_autocast_dtype(torch::kCPU, torch::kBFloat16);
  at::autocast::set_autocast_cache_enabled(true);
}

TEST(AutocastGuard, DefaultsToThreadDtype) {
  at::autocast::set_autocast_dtype(torch::kCPU, torch::kHalf);
  {
    const AutocastGuard guard({.device_type = torch::kCPU});
    EXPECT_EQ(get_product_dtype(), torch::kHalf);
  }
  at::autocast::set_autocast_dtype(torch::kCPU, torch::kBFloat16);
  const AutocastGuard outer(torch::kCPU, torch::kHalf);
  EXPECT_EQ(mezzo::autocast({.device_type = torch::kCPU}, get_product_dtype), torch::kHalf);
}

TEST(AutocastGuard, AcceptsTorchAutocastArguments) {
  {
    const mezzo::AutocastGuard autocast(torch::kCPU, torch::kHalf);
    EXPECT_EQ(get_product_dtype(), torch::kHalf);
  }
  {
    const AutocastGuard outer(torch::kCPU);
    const AutocastGuard disabled(torch::kCPU, std::nullopt, /*enabled=*/false);
    EXPECT_EQ(get_product_dtype(), torch::kFloat);
  }
  {
    const AutocastGuard uncached(torch::kCPU, torch::kHalf, true, /*cache_enabled=*/false);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  }
  const mezzo::AutocastGuard autocast(torch::Device("cpu"));
  EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
}

TEST(AutocastGuard, DeducesRuntimeDevice) {
  const mezzo::AutocastOptions options{.device_type = torch::kCPU};
  AutocastGuard from_options(options), from_device(torch::kCPU);
  static_assert(std::is_same_v<decltype(from_options), AutocastGuard<>>);
  static_assert(std::is_same_v<decltype(from_device), AutocastGuard<>>);
  static_assert(!std::is_default_constructible_v<AutocastGuard<>>);
  static_assert(!std::is_constructible_v<AutocastGuard<>, const char*>);
  static_assert(!std::is_constructible_v<AutocastGuard<torch::kCPU>, torch::DeviceType>);
  std::optional<AutocastGuard<>> member;
  member.emplace(torch::kCPU, torch::kHalf);
  EXPECT_EQ(get_product_dtype(), torch::kHalf);
  member.reset();
  EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
  from_device.end();
  from_options.end();
}

TEST(AutocastGuard, EndsBeforeScope) {
  const mezzo::AutocastGuard<torch::kCPU, torch::kHalf> outer;
  {
    mezzo::AutocastGuard<torch::kCPU> autocast;
    mezzo::AutocastGuard exact({.device_type = torch::kCPU, .enabled = false});
    EXPECT_EQ(get_product_dtype(), torch::kFloat);
    EXPECT_FALSE(exact.is_enabled());
    EXPECT_TRUE(autocast.is_enabled());
    exact.end();
    EXPECT_EQ(get_product_dtype(), torch::kBFloat16);
    autocast.end();
    EXPECT_FALSE(autocast.is_enabled());
    EXPECT_EQ(get_product_dtype(), torch::kHalf);
    autocast.end();
    EXPECT_EQ(get_product_dtype(), torch::kHalf) << "once is enough";
  }
  EXPECT_EQ(get_product_dtype(), torch::kHalf);
}

TEST(AutocastGuard, ThrowsForOutputDtype) {
  EXPECT_THAT([] { mezzo::AutocastGuard<torch::kCPU> guard({.output_dtype = torch::kFloat}); },
              ThrowsMessage<c10::Error>(HasSubstr("output_dtype: a guard has no result")));
  EXPECT_EQ(get_product_dtype(), torch::kFloat);
}

TEST(AutocastGuard, ThrowsForOptionsWithoutDevice) {
  EXPECT_THAT([] { AutocastGuard guard({.dtype = torch::kHalf}); },
              ThrowsMessage<c10::Error>(HasSubstr("device_type is not set")));
}

TEST(AutocastGuard, ThrowsForOptionsThatContradictType) {
  {
    const AutocastGuard<torch::kCPU, torch::kHalf> same(
        {.device_type = torch::kCPU, .dtype = torch::kHalf});
    EXPECT_EQ(get_product_dtype(), torch::kHalf);
  }
  EXPECT_THAT([] { AutocastGuard<torch::kCPU> autocast({.device_type = torch::kCUDA}); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("device_type is cuda in the options and cpu in the type")));
  EXPECT_THAT([] { AutocastGuard<torch::kCPU> autocast({.dtype = torch::kHalf}); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("dtype is Half in the options and BFloat16 in the type")));
}

TEST(AutocastGuard, UnsupportedDtypeThrowsAndPreservesState) {
  const ThreadState before;
  for (const bool enabled : {true, false}) {
    EXPECT_THAT(
        [&] {
          AutocastGuard guard(
              {.device_type = torch::kCPU, .dtype = torch::kFloat, .enabled = enabled});
        },
        ThrowsMessage<c10::Error>(
            HasSubstr("In CPU autocast, but the target dtype Float is not supported; use Half or "
                      "BFloat16")));
    EXPECT_EQ(ThreadState(), before);
  }
  EXPECT_THROW(AutocastGuard guard({.device_type = torch::kCUDA, .dtype = torch::kDouble}),
               c10::Error);
  EXPECT_EQ(ThreadState(), before);
}

TEST(AutocastGuard, AcceptsDevicesOfLibtorch) {
  for (int i = 0; i < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++i) {
    const auto device = static_cast<c10::DeviceType>(i);
    const bool is_available = at::autocast::is_autocast_available(device);
    SCOPED_TRACE(c10::DeviceTypeName(device));
    EXPECT_EQ(mezzo::detail::has_autocast(device), is_available);
    EXPECT_EQ(mezzo::default_autocast_dtype(device),
              is_available ? at::autocast::get_autocast_dtype(device) : c10::ScalarType::Undefined);
    if (!is_available) {
      EXPECT_THROW(AutocastGuard guard(device), c10::Error);
      continue;
    }
    EXPECT_EQ(mezzo::detail::autocast_key(device),
              at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const ThreadState before;
    {
      const AutocastGuard guard(device, torch::kBFloat16);
      EXPECT_TRUE(at::autocast::is_autocast_enabled(device));
      EXPECT_TRUE(mezzo::detail::is_any_autocast_enabled());
      EXPECT_EQ(at::autocast::get_autocast_dtype(device), torch::kBFloat16);
    }
    EXPECT_FALSE(mezzo::detail::is_any_autocast_enabled());
    EXPECT_EQ(ThreadState(), before);
    const auto recommended = mezzo::recommended_autocast(device);
    EXPECT_EQ(recommended.device_type, device);
    if (device != torch::kCPU && device != torch::kCUDA) {
      EXPECT_EQ(recommended.dtype, mezzo::default_autocast_dtype(device));
    }
  }
}

TEST(AutocastGuard, AcceptsMps) {
  static_assert(mezzo::default_autocast_dtype(torch::kMPS) == torch::kHalf);
  static_assert(mezzo::is_autocast_dtype_supported(torch::kMPS, torch::kBFloat16));
  const ThreadState before;
  const auto is_on = [] { return at::autocast::is_autocast_enabled(torch::kMPS); };
  EXPECT_FALSE(is_on());
  {
    const mezzo::AutocastGuard<torch::kMPS> autocast;
    EXPECT_TRUE(is_on());
    EXPECT_EQ(at::autocast::get_autocast_dtype(torch::kMPS), torch::kHalf);
    const AutocastGuard inner({.device_type = torch::kMPS, .dtype = torch::kBFloat16});
    EXPECT_EQ(at::autocast::get_autocast_dtype(torch::kMPS), torch::kBFloat16);
    const AutocastGuard off({.device_type = torch::kMPS, .enabled = false});
    EXPECT_FALSE(is_on());
  }
  EXPECT_FALSE(is_on());
  EXPECT_EQ(ThreadState(), before);
  EXPECT_EQ(mezzo::recommended_autocast(torch::kMPS).dtype, torch::kHalf);
}

TEST(AutocastGuard, ThrowsForUnsupportedDevice) {
  EXPECT_THAT(
      [] { AutocastGuard guard({.device_type = torch::kMeta}); },
      ThrowsMessage<c10::Error>(HasSubstr(
          "unsupported autocast device_type 'meta'; this libtorch has autocast for cpu, cuda,")));
  EXPECT_THROW(AutocastGuard guard({.device_type = torch::kMeta, .dtype = torch::kHalf}),
               c10::Error);
}

TEST(AutocastOptions, PrintsMembersThatAreSet) {
  const auto print = [](const mezzo::AutocastOptions& options) {
    std::ostringstream text;
    text << options;
    return text.str();
  };
  EXPECT_EQ(print({}), "AutocastOptions(enabled=true)");
  EXPECT_EQ(print({.device_type = torch::kCUDA, .dtype = torch::kHalf}),
            "AutocastOptions(device_type=cuda, dtype=Half, enabled=true)");
  EXPECT_EQ(print({.device_type = torch::kCPU,
                   .enabled = false,
                   .output_dtype = torch::kFloat,
                   .cache_enabled = true,
                   .reason = "no instructions"}),
            "AutocastOptions(device_type=cpu, enabled=false, output_dtype=Float, "
            "cache_enabled=true, reason=\"no instructions\")");
}

// mezzo redeclares libtorch's functions: an overload would make these ambiguous.
static_assert(std::is_same_v<decltype(&at::autocast::set_autocast_dtype),
                             void (*)(c10::DeviceType, c10::ScalarType)>);
static_assert(std::is_same_v<decltype(&at::autocast::get_autocast_dtype),
                             c10::ScalarType (*)(c10::DeviceType)>);
static_assert(
    std::is_same_v<decltype(&at::autocast::set_autocast_enabled), void (*)(c10::DeviceType, bool)>);
static_assert(
    std::is_same_v<decltype(&at::autocast::is_autocast_enabled), bool (*)(c10::DeviceType)>);
static_assert(std::is_same_v<decltype(&at::autocast::set_autocast_cache_enabled), void (*)(bool)>);

}  // namespace
