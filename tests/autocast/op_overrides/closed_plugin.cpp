// Opens a plugin that installs overrides, closes it and calls an op that they name:
// closed_plugin PLUGIN

#include <ATen/autocast_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <dlfcn.h>

#include <cstdio>

int main(int argc, char** argv) {
  void* const plugin = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (plugin == nullptr) {
    std::fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "name one plugin");
    return 2;
  }
  reinterpret_cast<void (*)(bool)>(dlsym(plugin, "enter"))(/*deny=*/true);
  reinterpret_cast<void (*)()>(dlsym(plugin, "leave"))();
  dlclose(plugin);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const bool lowers = at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type() == at::kBFloat16;
  return lowers ? 0 : 1;
}
