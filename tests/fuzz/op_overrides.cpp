#include <mezzo/autocast/op_overrides.h>

#include <c10/util/Exception.h>

#include "targets.h"

namespace fuzz {

/// The text of an OpOverrides: what is taken reads back from what it prints.
void policy(std::string_view bytes) {
  try {
    const auto policy = mezzo::OpOverrides::parse(bytes);
    const auto again = mezzo::OpOverrides::parse(policy.to_string());
    require(again.entries() == policy.entries(), "a policy reads back what it printed");
    require(policy.with(again).entries() == policy.entries(), "a policy on itself changes nothing");
  } catch (const c10::Error&) {
  }
}

}  // namespace fuzz
