// What tests can call; see __init__.py.
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "order.h"
#include "passes.h"
#include "process_group.h"

namespace {

namespace py = pybind11;

// The capsules point to fastsync::Passes.
py::capsule passes_over(const py::capsule& of_cpu) {
  const auto& passes = standin::passes_over(*of_cpu.get_pointer<const fastsync::Passes>());
  return py::capsule(static_cast<const void*>(&passes));
}

c10::intrusive_ptr<standin::Group> make_group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
  return c10::make_intrusive<standin::Group>(std::move(gloo), rank, size);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("NUM_DEVICES") = standin::kNumDevices;
  m.def("take_violations", &standin::take_violations);
  m.def("take_host_waits", &standin::take_host_waits);
  m.def("set_behind", &standin::set_behind, py::arg("is_behind"));
  m.def("allocated_bytes", &standin::allocated_bytes);
  m.def("passes_over", &passes_over, py::arg("of_cpu"));

  py::class_<standin::Call>(m, "Call")
      .def_readonly("name", &standin::Call::name)
      .def_readonly("numel", &standin::Call::numel)
      .def_readonly("dtype", &standin::Call::dtype)
      .def_readonly("nbytes", &standin::Call::nbytes)
      .def_readonly("alignment", &standin::Call::alignment)
      .def_readonly("stream", &standin::Call::stream)
      .def_readonly("is_in_group", &standin::Call::is_in_group);

  py::class_<standin::Group, c10d::Backend, c10::intrusive_ptr<standin::Group>>(m, "Group")
      .def(py::init(&make_group), py::arg("gloo"), py::arg("rank"), py::arg("size"))
      .def("take_calls", &standin::Group::take_calls)
      .def("fail_after", &standin::Group::fail_after, py::arg("calls"))
      .def("is_open", &standin::Group::is_open)
      .def("kept_bytes", &standin::Group::kept_bytes);
}
