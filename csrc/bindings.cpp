// What Python can call: a table of contents. The operators themselves are torch.ops.fastsync.*, see ops.cpp.
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend.h"
#include "chunk_table.h"
#include "ddp_hook.h"

namespace {

namespace py = pybind11;
using c10::ivalue::Future;
using fastsync::BucketTotals;
using fastsync::HookState;

bool built_with_cuda() {
#ifdef FASTSYNC_WITH_CUDA
  return true;
#else
  return false;
#endif
}

std::map<std::string, std::string> build_info() { return {{"torch", TORCH_VERSION}, {"compiler", __VERSION__}}; }

// The last owner of a Gloo group waits for the group's threads to end, and those may be waiting for the GIL.
void delete_without_gil(HookState* state) {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) {
    no_gil.emplace();
  }
  delete state;
}

std::shared_ptr<HookState> new_hook_state(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return {new HookState(std::move(group)), &delete_without_gil};
}

// DDP expects a Python object from a hook registered in Python. It is made here, where the GIL is held anyway, so that
// nothing has to wait for the GIL when the bucket is done.
auto run(HookState& state, c10d::GradBucket& bucket, const std::string& wire) {
  const auto type = c10::PyObjectType::get();
  const c10::IValue buffer = torch::jit::toIValue(py::cast(bucket.getBuffer()), type);
  const py::gil_scoped_release no_gil;
  auto future = state.run(bucket, fastsync::wire_from_name(wire));
  // The storage is named, because a future would look for it inside a Python object with the GIL.
  auto with_buffer = [buffer, storage = bucket.getBuffer().storage().getWeakStorageImpl()](Future& averaged) {
    averaged.value();  // throws what went wrong
    return std::make_tuple(buffer, std::vector{storage});
  };
  return std::make_shared<torch::jit::PythonFutureWrapper>(future->then(std::move(with_buffer), type));
}

void set_wire(HookState& state, const std::string& wire) { state.set_wire(fastsync::wire_from_name(wire)); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "fastsync's compiled half; use it through the fastsync package.";
  const py::call_guard<py::gil_scoped_release> no_gil;

  m.def("built_with_cuda", &built_with_cuda);
  m.def("build_info", &build_info);

  py::class_<BucketTotals>(m, "BucketTotals")
      .def_readonly("elements", &BucketTotals::elements)
      .def_readonly("wire_bytes", &BucketTotals::wire_bytes)
      .def_readonly("num_syncs", &BucketTotals::num_syncs)
      .def_readonly("num_timed", &BucketTotals::num_timed)
      .def_readonly("pack_time", &BucketTotals::pack_time)
      .def_readonly("collective_time", &BucketTotals::collective_time)
      .def_readonly("unpack_time", &BucketTotals::unpack_time);

  py::class_<HookState::Totals>(m, "HookTotals")
      .def_readonly("buckets", &HookState::Totals::buckets)
      .def_readonly("all", &HookState::Totals::all)
      .def_readonly("num_steps", &HookState::Totals::num_steps)
      .def_readonly("num_timed_steps", &HookState::Totals::num_timed_steps)
      .def_readonly("exposed_time", &HookState::Totals::exposed_time);

  py::class_<HookState, std::shared_ptr<HookState>>(m, "HookState")
      .def(py::init(&new_hook_state), py::arg("process_group"))
      .def("run", &run, py::arg("bucket"), py::arg("wire"))
      .def("set_wire", &set_wire, py::arg("wire"), no_gil)
      .def("grad_stats", &HookState::grad_stats, no_gil)
      .def("num_steps", &HookState::num_steps, no_gil)
      .def("totals", &HookState::totals, no_gil)
      .def("scales", &HookState::scales, no_gil)
      .def("set_scales", &HookState::set_scales, py::arg("scales"), no_gil);

  m.def("register_hook", &fastsync::register_hook, py::arg("reducer"), py::arg("state"));

  m.def("chunk_table", &fastsync::chunk_table, py::arg("numels"), py::arg("chunk_size"));
  m.def("launch_ranges", &fastsync::launch_ranges, py::arg("numels"), py::arg("capacity"));
}
