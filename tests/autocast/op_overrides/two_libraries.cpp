// Loads two shared libraries that include mezzo, with local symbols, and checks that both use the
// same overrides and install one kernel per op: two_libraries FIRST SECOND

#include "../../support/shared_library.h"

using test_support::expect;

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const test_support::SharedLibrary first(argv[1], RTLD_LOCAL), second(argv[2], RTLD_LOCAL);
  first.call<void>("enter", /*deny=*/true);
  expect(first.call<bool>("mm_runs_in_float"), "the first library uses its own overrides");
  expect(second.call<bool>("mm_runs_in_float"), "so does the second");
  second.call<void>("enter", /*deny=*/false);
  expect(!first.call<bool>("mm_runs_in_float"),
         "inner overrides of the second library apply in the first");
  expect(first.call<const void*>("registry") == second.call<const void*>("registry"),
         "there is one registry");
  second.call<void>("leave");
  expect(first.call<bool>("mm_runs_in_float"), "the outer overrides are restored");
  first.call<void>("leave");
  return expect(true, "");
}
