// These functions choose the kernels, and give a device passes of its own.
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "passes/backend.h"

using fastsync::Passes;

// The capsules point to a struct Passes.
PYBIND11_MODULE(fastsync_passes, m) {
  const auto type_of = [](const std::string& device) { return c10::Device(device).type(); };
  m.def("use_kernels", &fastsync::use_kernels, pybind11::arg("name"));
  m.def(
      "passes_of",
      [type_of](const std::string& device) {
        const Passes* const fused = fastsync::fused_passes(type_of(device));
        TORCH_CHECK_VALUE(fused != nullptr, "device_type: no passes were built for ", device);
        return pybind11::capsule(static_cast<const void*>(fused));
      },
      pybind11::arg("device_type"));
  m.def(
      "register_passes",
      [type_of](const std::string& device, const pybind11::capsule& passes) {
        fastsync::register_passes(type_of(device), *passes.get_pointer<const Passes>());
      },
      pybind11::arg("device_type"), pybind11::arg("passes"));
}
