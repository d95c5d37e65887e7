// The three functions of the CUDA driver that return a compute capability, for two GPUs: 9.0, 8.6.

namespace {
bool initialised = false;
constexpr int kInvalidDevice = 101;
constexpr int kNotInitialised = 3;
}  // namespace

extern "C" int cuInit(unsigned flags) {
  initialised = flags == 0;
  return initialised ? 0 : 1;
}

extern "C" int cuDeviceGet(int* device, int ordinal) {
  if (!initialised) {
    return kNotInitialised;
  }
  if (ordinal < 0 || ordinal > 1) {
    return kInvalidDevice;
  }
  *device = ordinal + 40;  // a handle need not be the ordinal
  return 0;
}

extern "C" int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 40 || device > 41 || attribute < 75 || attribute > 76) {
    return kInvalidDevice;
  }
  const int capability[2][2] = {{9, 0}, {8, 6}};
  *value = capability[device - 40][attribute - 75];
  return 0;
}
