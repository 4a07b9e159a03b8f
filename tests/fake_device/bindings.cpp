// What tests can call; see __init__.py.
#include <torch/csrc/utils/pybind.h>

#include "device.cpp"
#include "operators.cpp"
#include "order.cpp"
#include "passes.cpp"
#include "process_group.cpp"

namespace {

namespace py = pybind11;

// The capsules point to fastsync::Passes.
py::capsule passes_over(const py::capsule& of_cpu) {
  const auto& passes = fake_device::passes_over(*of_cpu.get_pointer<const fastsync::Passes>());
  return py::capsule(static_cast<const void*>(&passes));
}

c10::intrusive_ptr<fake_device::Group> make_group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
  return c10::make_intrusive<fake_device::Group>(std::move(gloo), rank, size);
}

}  // namespace

PYBIND11_MODULE(fake_device, m) {
  m.def("take_violations", &fake_device::take_violations);
  m.def("take_host_waits", &fake_device::take_host_waits);
  m.def("allocated_bytes", &fake_device::allocated_bytes);
  m.def("begin_capture", &fake_device::begin_capture);
  m.def("end_capture",
        [] { return fake_device::end_capture(fake_device::current_stream(fake_device::current_device())); });
  m.def("replay", &fake_device::replay, py::arg("graph"));
  m.def("set_broken", &fake_device::set_broken, py::arg("is_broken"));
  m.def("set_most_bytes", &fake_device::set_most_bytes, py::arg("bytes"));
  m.def("take_uploads", &fake_device::take_uploads);
  m.def("passes_over", &passes_over, py::arg("of_cpu"));

  py::class_<fake_device::Group, c10d::Backend, c10::intrusive_ptr<fake_device::Group>>(m, "Group")
      .def(py::init(&make_group), py::arg("gloo"), py::arg("rank"), py::arg("size"))
      .def("fail_after", &fake_device::Group::fail_after, py::arg("calls"))
      .def("is_open", &fake_device::Group::is_open)
      .def("run_at_once", &fake_device::Group::run_at_once)
      .def("bind", [](fake_device::Group& group) { group.setBoundDeviceId(c10::Device(fake_device::kType, 0)); })
      .def("num_lent", &fake_device::Group::num_lent)
      .def("kept_bytes", &fake_device::Group::kept_bytes);
}
