// error: M needs exactly one forward, neither a template nor overloaded
#include <mezzo/autocast/autocast_module.h>

struct AnyNet : torch::nn::Module {
#ifdef MEZZO_LEGAL
  at::Tensor forward(at::Tensor x) { return x; }
#else
  template <class T>
  T forward(T x) {
    return x;
  }
#endif
};

void wrap_template() {
  mezzo::AutocastModule<AnyNet> net(std::make_shared<AnyNet>(), {.device = c10::DeviceType::CPU});
}
