// Stands for libtorch 2.9.
#define TORCH_VERSION_MAJOR 2
#define TORCH_VERSION_MINOR 9
