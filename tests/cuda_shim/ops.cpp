// passes/ops.cpp once more: as torch.ops.fastsync_emulated, for tensors on a CPU, where the passes of passes/cuda run.
// Compiled with -Dfastsync=fastsync_emulated, like all that belongs to it.
#include <torch/library.h>
#undef TORCH_LIBRARY
#define TORCH_LIBRARY TORCH_LIBRARY_FRAGMENT  // which takes a name that is a macro

#include "cuda_runtime.h"
#include "passes/aten/passes.h"
#include "passes/ops.cpp"

namespace fastsync::cpu {
namespace {

// One for all calls: each has to leave it ready for the next.
void* workspace() {
  alignas(double) static std::byte bytes[cuda::kWorkspaceBytes] = {};
  return bytes;
}

}  // namespace

void pack(const PackArgs& args) { cuda::pack(args, workspace(), nullptr); }
void unpack(const UnpackArgs& args) { cuda::unpack(args, workspace(), nullptr); }
void measure(const MeasureArgs& args) { cuda::measure(args, workspace(), nullptr); }
void reduce(const ReduceArgs& args) { cuda::reduce(args, nullptr); }

}  // namespace fastsync::cpu

// What backend.cpp refers to, and does not call here.
namespace fastsync::aten {

void pack(const PackArgs&, c10::Device) {}
void unpack(const UnpackArgs&, c10::Device) {}
void measure(const MeasureArgs&, c10::Device) {}
void reduce(const ReduceArgs&, c10::Device) {}

}  // namespace fastsync::aten

TORCH_LIBRARY_FRAGMENT(fastsync, library) { library.def("set_descending", &emulator::set_descending); }
