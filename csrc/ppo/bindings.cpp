// The trainer's operators are torch.ops.fastsync.*, which the other files of this folder define: importing the module
// registers them.
#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.doc() = "Operators of fastsync.ppo, as torch.ops.fastsync.*."; }
