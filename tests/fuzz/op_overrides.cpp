#include <mezzo/autocast/op_overrides.h>

#include <c10/util/Exception.h>

#include "targets.h"

namespace fuzz {

/// The text of OpOverrides. If it parses, printing and parsing it again gives equal overrides.
void op_overrides(std::string_view bytes) {
  try {
    const auto overrides = mezzo::OpOverrides::parse(bytes);
    const auto parsed_again = mezzo::OpOverrides::parse(overrides.to_string());
    require(parsed_again.entries() == overrides.entries(), "printed overrides parse to equal ones");
    require(overrides.with(parsed_again).entries() == overrides.entries(),
            "merging equal overrides changes nothing");
  } catch (const c10::Error&) {
  }
}

}  // namespace fuzz
