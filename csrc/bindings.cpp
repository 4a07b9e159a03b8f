// This file lists all that Python can call, as a table of contents.
#include <c10/util/intrusive_ptr.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "backend/host_backend.h"
#include "engine/bucket.h"
#include "engine/ddp_hook.h"
#include "engine/optimizer_calls.h"
#include "engine/parameter_gather.h"
#include "engine/random_state.h"
#include "engine/ranks_differ.h"
#include "engine/sharded.h"
#include "engine/synchronizer.h"
#include "engine/tensor_sample.h"
#include "passes/backend.h"
#include "sums/stats_in_order.h"
#include "transport/agreement.h"
#include "transport/host.h"
#include "transport/host_copy.h"
#include "transport/shared_tensors.h"
#include "transport/waiting.h"

namespace {

namespace py = pybind11;
using c10::ivalue::Future;
using fastsync::Algorithm;
using fastsync::BucketTotals;
using fastsync::Compression;
using fastsync::CompressionTable;
using fastsync::DType;
using fastsync::EngineState;
using fastsync::GatherWork;
using fastsync::HookPlace;
using fastsync::HookState;
using fastsync::HostBackend;
using fastsync::NoSharedTensors;
using fastsync::Op;
using fastsync::ParameterGather;
using fastsync::RandomState;
using fastsync::RanksDifferError;
using fastsync::ShardedState;
using fastsync::Shards;
using fastsync::SharedTensors;
using fastsync::Synchronizer;
using fastsync::SyncTotals;

bool built_with_cuda() {
#ifdef FASTSYNC_WITH_CUDA
  return true;
#else
  return false;
#endif
}

c10::DeviceType device_type(const std::string& name) { return c10::Device(name).type(); }

// Makes an engine without the GIL, because it connects to the store, and has it deleted without the GIL. The last owner
// of a Gloo group waits for the group's threads to end, and those may be waiting for the GIL.
template <class Engine, class... Args>
std::shared_ptr<Engine> make_shared(Args... args) {
  const auto delete_without_gil = [](Engine* engine) {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) {
      no_gil.emplace();
    }
    delete engine;
  };
  const py::gil_scoped_release no_gil;
  return {new Engine(std::move(args)...), delete_without_gil};
}

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Turns the warnings of a call into Python's warnings, when the call has ended and the GIL is held again.
class PythonWarnings {
 public:
  PythonWarnings() = default;
  ~PythonWarnings() noexcept(false) {
    if (std::uncaught_exceptions() > 0) {
      handler_.set_in_exception();
    }
  }
  PythonWarnings(const PythonWarnings&) = delete;
  PythonWarnings& operator=(const PythonWarnings&) = delete;

 private:
  torch::PyWarningHandler handler_;
};

// DDP expects a Python object from a hook registered in Python. This makes the object while the GIL is held anyway, so
// that nothing has to wait for the GIL when the bucket is done.
auto run(HookState& state, c10d::GradBucket& bucket, std::shared_ptr<const CompressionTable> compressions) {
  const auto type = c10::PyObjectType::get();
  const c10::IValue buffer = torch::jit::toIValue(py::cast(bucket.getBuffer()), type);
  const py::gil_scoped_release no_gil;
  auto future = state.run(bucket, std::move(compressions));
  // The future gets the storage, because otherwise it would take the GIL to look for the storage in the Python object.
  // A sparse buffer has none of its own.
  std::vector<Future::WeakStorage> storages;
  if (!bucket.getBuffer().is_sparse()) {
    storages.push_back(bucket.getBuffer().storage().getWeakStorageImpl());
  }
  auto with_buffer = [buffer, storages](Future& averaged) {
    averaged.value();  // throws the error, if there is one
    return std::make_tuple(buffer, storages);
  };
  return std::make_shared<torch::jit::PythonFutureWrapper>(future->then(std::move(with_buffer), type));
}

// Makes a compression from its names in Python, which Python has checked.
Compression make_compression(const std::string& wire, bool sums_in_float32, bool error_feedback,
                             const std::optional<std::string>& algorithm, int64_t ranks_per_node, int64_t low_rank) {
  static const std::map<std::string, std::optional<DType>> wires{{"none", std::nullopt},     {"fp16", DType::kFloat16},
                                                                 {"bf16", DType::kBFloat16}, {"int8", DType::kInt8},
                                                                 {"int4", DType::kInt4},     {"lowrank", std::nullopt}};
  static const std::map<std::string, Algorithm> algorithms{{"one_shot", Algorithm::kOneShot},
                                                           {"two_shot", Algorithm::kTwoShot}};
  return {wires.at(wire), sums_in_float32,
          error_feedback, algorithm ? std::optional(algorithms.at(*algorithm)) : std::nullopt,
          ranks_per_node, low_rank};
}

// Takes the op's name in Python, which Python has checked.
std::shared_ptr<Synchronizer> make_synchronizer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                                Group group, int64_t bucket_cap_bytes, const std::string& op,
                                                std::set<std::string> sparse) {
  static const std::map<std::string, Op> ops{{"mean", Op::kMean}, {"mean_of_used", Op::kMeanOfUsed}, {"sum", Op::kSum}};
  return ::make_shared<Synchronizer>(std::move(parameters), std::move(names), std::move(group), bucket_cap_bytes,
                                     ops.at(op), std::move(sparse));
}

// Returns the factor of a parameter's gradients that the first step with lowrank begins with; None if they travel as
// they are.
std::optional<at::Tensor> first_factor_of(const at::Tensor& parameter, int64_t rank) {
  const auto sides = fastsync::low_rank_sides(parameter, rank);
  const at::ScalarType dtype = fastsync::compute_dtype(fastsync::grad_dtype_of(parameter));
  return sides ? std::optional(fastsync::first_factor(sides->columns, rank, parameter.options().dtype(dtype)))
               : std::nullopt;
}

// Returns the fields of BucketStats in fastsync/sync/stats.py. Sums over buckets have no kernels. For them some fields
// are left out, and keep their defaults.
py::dict stats_of(const BucketTotals& totals) {
  // On a GPU not all syncs are timed. So times are scaled up to the number of syncs.
  const double scale = totals.num_timed > 0 ? static_cast<double>(totals.num_syncs) / totals.num_timed : 0.0;
  py::dict stats;
  stats["numel"] = totals.numel;
  stats["is_sparse"] = totals.is_sparse;
  stats["num_syncs"] = totals.num_syncs;
  stats["wire_bytes"] = totals.wire_bytes.load();
  stats["pack_time"] = totals.pack_time * scale;
  stats["collective_time"] = totals.collective_time * scale;
  stats["unpack_time"] = totals.unpack_time * scale;
  if (!totals.kernels.empty()) {
    const char* const shared = totals.num_hosts > 1 ? "two_level" : "shared_memory";
    stats["transport"] = totals.shares_memory ? shared : "process_group";
    stats["num_hosts"] = std::max<int64_t>(1, totals.num_hosts);
    stats["transport_reason"] = totals.why_not_shared;
    stats["kernels"] = totals.kernels;
  }
  return stats;
}

// Returns the fields of SyncStats. The newest bucket of dense gradients tells how gradients travel, if there is one.
py::dict stats_of(const SyncTotals& totals) {
  py::dict stats = !totals.buckets.empty() ? stats_of(totals.buckets.back()) : py::dict();
  for (const BucketTotals& bucket : totals.buckets) {
    if (!bucket.is_sparse) {
      stats = stats_of(bucket);
    }
  }
  for (const auto& [name, value] : stats_of(totals.all)) {
    stats[name] = value;
  }
  int64_t numel = 0;
  py::list buckets;
  for (const BucketTotals& bucket : totals.buckets) {
    buckets.append(stats_of(bucket));
    numel += bucket.numel;
  }
  const double scale =
      totals.num_timed_steps > 0 ? static_cast<double>(totals.num_steps) / totals.num_timed_steps : 0.0;
  stats["numel"] = numel;
  stats["num_steps"] = totals.num_steps;
  stats["exposed_time"] = totals.exposed_time * scale;
  stats["buckets"] = buckets;
  return stats;
}

// Makes a function that calls the method while no other thread uses the engine.
template <class Engine = EngineState, class Result, class... Args>
auto locked(Result (Engine::*method)(Args...)) {
  return [method](Engine& engine, Args... args) {
    return engine.locked([&] { return (engine.*method)(std::forward<Args>(args)...); });
  };
}

// Does the same for a method that belongs between two steps. If a failed backward has left a step unfinished, the
// function ends that step first.
template <class Engine = EngineState, class Result, class... Args>
auto between_steps(Result (Engine::*method)(Args...)) {
  return [method](Engine& engine, Args... args) {
    engine.end_interrupted();
    return locked<Engine>(method)(engine, std::forward<Args>(args)...);
  };
}

// Makes a function that calls the method of an engine's shards while no other thread uses the engine.
template <class Result, class... Args>
auto with_shards(Result (Shards::*method)(Args...)) {
  return [method](Synchronizer& engine, Args... args) {
    return engine.locked([&] { return (engine.shards().*method)(std::forward<Args>(args)...); });
  };
}

// Gloo's class is Python's alone: torch's packages lack its headers.
c10::intrusive_ptr<c10d::Backend> make_gloo(const HostBackend::StorePtr& store, int rank, int size,
                                            std::chrono::milliseconds timeout) {
  const py::gil_scoped_acquire gil;
  const auto gloo = py::module_::import("torch.distributed").attr("ProcessGroupGloo");
  return gloo(store, rank, size, py::arg("timeout") = timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
}

c10::intrusive_ptr<HostBackend> make_backend(const HostBackend::StorePtr& store, int rank, int size,
                                             std::chrono::milliseconds timeout) {
  return c10::make_intrusive<HostBackend>(store, rank, size, timeout, &make_gloo);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastsync's compiled half; use it through the fastsync package.";
  const py::call_guard<PythonWarnings, py::gil_scoped_release> no_gil;

  RanksDifferError::type = py::object(py::module_::import("fastsync.errors").attr("RanksDifferError")).release().ptr();

  m.def("built_with_cuda", &built_with_cuda);
  m.def("build_info",
        [] { return std::map<std::string, std::string>{{"torch", TORCH_VERSION}, {"compiler", __VERSION__}}; });
  m.def("shared_memory_obstacle", &fastsync::Host::obstacle);
  m.def("num_usable_cores", &fastsync::num_usable_cores);
  py::class_<HostBackend, c10d::Backend, c10::intrusive_ptr<HostBackend>>(m, "HostBackend")
      .def(py::init(&make_backend), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), no_gil)
      .def("_set_default_timeout", &HostBackend::setTimeout, py::arg("timeout"), no_gil)
      .def_property_readonly("options", &HostBackend::getBackendOptions)
      .def_property_readonly("shares_memory", &HostBackend::shares_memory)
      .def_property_readonly("why_not_shared", &HostBackend::why_not_shared);

  py::class_<Compression>(m, "Compression")
      .def(py::init(&make_compression), py::arg("wire"), py::arg("sums_in_float32") = false,
           py::arg("error_feedback") = false, py::arg("algorithm") = py::none(), py::arg("ranks_per_node") = 1,
           py::arg("low_rank") = 0);
  m.def("stats_in_order", &fastsync::stats_in_order, py::arg("gradients"), no_gil);
  m.def("first_factor", &first_factor_of, py::arg("parameter"), py::arg("rank"), no_gil);

  py::class_<CompressionTable, std::shared_ptr<CompressionTable>>(m, "CompressionTable")
      .def(py::init([](decltype(CompressionTable::rows) rows, std::string description) {
             return CompressionTable{std::move(rows), std::move(description)};
           }),
           py::arg("rows"), py::arg("description"));

  py::class_<fastsync::Liveness, std::shared_ptr<fastsync::Liveness>>(m, "Liveness")
      .def(py::init(&make_shared<fastsync::Liveness, Group, std::string>), py::arg("process_group"), py::arg("engine"))
      .def("silent_ranks", &fastsync::Liveness::silent_ranks, no_gil);

  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) {
        std::rethrow_exception(thrown);
      }
    } catch (const NoSharedTensors& error) {
      const py::object raised = py::handle(PyExc_ValueError)(error.what_without_backtrace());
      raised.attr("reason") = error.reason;
      PyErr_SetObject(PyExc_ValueError, raised.ptr());
    }
  });
  py::class_<SharedTensors, std::shared_ptr<SharedTensors>>(m, "SharedTensors")
      .def(py::init(&make_shared<SharedTensors, Group, int64_t, int64_t>), py::arg("process_group"), py::arg("bytes"),
           py::arg("num_numbers"))
      .def("tensor", &SharedTensors::tensor, py::arg("offset"), py::arg("sizes"), py::arg("strides"), py::arg("dtype"))
      .def("ranks", &SharedTensors::ranks)
      .def("give_up", &SharedTensors::give_up, no_gil);

  py::class_<fastsync::HostCopy>(m, "HostCopy")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def("wait", &fastsync::HostCopy::wait, no_gil);

  py::class_<EngineState, std::shared_ptr<EngineState>>(m, "EngineState")
      .def("set_compressions", between_steps(&EngineState::set_compressions), py::arg("compressions"), no_gil)
      .def("step", between_steps(&EngineState::step), no_gil)
      .def("set_step", between_steps(&EngineState::set_step), py::arg("step"), no_gil)
      .def("end_interrupted", &EngineState::end_interrupted, no_gil)
      .def("saved", between_steps(&EngineState::saved), no_gil)
      .def("set_saved", between_steps(&EngineState::set_saved), py::arg("rows"), no_gil)
      .def("grad_stats", locked(&EngineState::grad_stats), no_gil)
      .def("num_steps", locked(&EngineState::num_steps), no_gil)
      .def("compare_weights", locked(&EngineState::compare_weights), py::arg("parameters"), py::arg("names"),
           py::arg("machine"), no_gil)
      .def("is_sample_due", locked(&EngineState::is_sample_due), no_gil)
      .def("sample_weights", locked(&EngineState::sample_weights), no_gil)
      .def("is_captured", locked(&EngineState::is_captured), no_gil)
      .def(
          "give_up", [](EngineState& engine) { engine.locked([&] { engine.give_up(); }); }, no_gil)
      .def("roll_back_step", between_steps(&EngineState::roll_back_step), no_gil)
      .def("take_failure", [](EngineState& engine) { return engine.liveness().take_failure(); })
      .def("stats", [](EngineState& engine) {
        const auto totals = [&engine] {
          const py::gil_scoped_release no_gil;
          return engine.locked([&] { return engine.totals(); });
        }();
        return stats_of(totals);
      });

  py::class_<HookState, EngineState, std::shared_ptr<HookState>>(m, "HookState")
      .def(py::init(&make_shared<HookState, Group, bool>), py::arg("process_group"), py::arg("sums") = false)
      .def("run", &run, py::arg("bucket"), py::arg("compressions"))
      .def("set_weight", locked<HookState>(&HookState::set_weight), py::arg("weight"), py::arg("parameters"),
           py::arg("names"), no_gil)
      .def_static("watch_sums", &HookState::watch_sums, py::arg("state"), py::arg("parameters"), no_gil)
      .def("compare_names", locked<HookState>(&HookState::compare_names), py::arg("parameters"), py::arg("names"),
           no_gil)
      .def("note_update", &HookState::note_update, no_gil)
      .def("gradients_are_unchanged", locked<HookState>(&HookState::gradients_are_unchanged), no_gil);
  m.def("compare_gradients", &fastsync::compare_gradients, py::arg("process_group"), py::arg("parameters"),
        py::arg("names"), no_gil);
  py::class_<HookPlace>(m, "HookPlace")
      .def(py::init<c10d::Reducer&, Group>(), py::arg("reducer"), py::arg("process_group"))
      .def("put", &HookPlace::put, py::arg("state"), no_gil);
  m.def("are_in_reducers", &fastsync::are_in_reducers, py::arg("parameters"), no_gil);

  py::class_<Synchronizer, EngineState, std::shared_ptr<Synchronizer>>(m, "Synchronizer")
      .def(py::init(&make_synchronizer), py::arg("parameters"), py::arg("names"), py::arg("process_group"),
           py::arg("bucket_cap_bytes"), py::arg("op") = "mean", py::arg("sparse") = std::set<std::string>())
      .def("attach", &Synchronizer::attach, py::arg("parameters"), py::arg("overlap"), no_gil)
      .def("detach", &Synchronizer::detach, no_gil)
      .def("synchronize", &Synchronizer::synchronize, no_gil)
      .def("abandon_step", &Synchronizer::abandon_step, no_gil)
      .def("note_update", &Synchronizer::note_update, no_gil)
      .def("set_enabled", locked<Synchronizer>(&Synchronizer::set_enabled), py::arg("enabled"), no_gil)
      .def("agree", locked<Synchronizer>(&Synchronizer::agree), py::arg("init_sync"), no_gil)
      .def("piggyback", between_steps<Synchronizer>(&Synchronizer::piggyback), py::arg("name"), py::arg("value"),
           no_gil)
      .def("piggybacked", locked<Synchronizer>(&Synchronizer::piggybacked), no_gil)
      .def("set_weight", between_steps<Synchronizer>(&Synchronizer::set_weight), py::arg("weight"), no_gil)
      .def("set_micro_batches", locked<Synchronizer>(&Synchronizer::set_micro_batches), py::arg("num_micro_batches"),
           no_gil)
      .def("set_joining", between_steps<Synchronizer>(&Synchronizer::set_joining), py::arg("is_joining"),
           py::arg("states") = "", no_gil)
      .def("run_out", locked<Synchronizer>(&Synchronizer::run_out), no_gil)
      .def("num_active", locked<Synchronizer>(&Synchronizer::num_active), no_gil)
      .def("make_revocable", between_steps<Synchronizer>(&Synchronizer::make_revocable), no_gil)
      .def("set_signal", between_steps<Synchronizer>(&Synchronizer::set_signal), py::arg("signal"), no_gil)
      .def(
          "signals", [](Synchronizer& self) { return self.locked([&] { return self.signals(); }); }, no_gil)
      .def(
          "waited_for", [](Synchronizer& self) { return self.locked([&] { return self.lateness().waited_for(); }); },
          no_gil)
      .def(
          "warn_of_late_ranks",
          [](Synchronizer& self, double share, double seconds) {
            self.locked([&] { self.lateness().warn_above(share, seconds); });
          },
          py::arg("share"), py::arg("seconds"), no_gil)
      .def(
          "set_buffers",
          [](Synchronizer& self, std::function<std::string()> description,
             std::function<at::Tensor(const at::Tensor&)> values, std::function<void(const at::Tensor&)> arrive) {
            self.locked([&] { self.set_buffers({std::move(description), std::move(values), std::move(arrive)}); });
          },
          py::arg("description"), py::arg("values"), py::arg("arrive"), no_gil)
      .def(
          "take_over", [](Synchronizer& self, Synchronizer& other) { self.locked([&] { self.take_over(other); }); },
          py::arg("other"), no_gil)
      .def("expect_same_data", locked<Synchronizer>(&Synchronizer::expect_same_data), no_gil)
      .def("set_optimizer", locked<Synchronizer>(&Synchronizer::set_optimizer), py::arg("description"), no_gil)
      .def(
          "set_shards",
          [](Synchronizer& self, std::shared_ptr<SharedTensors> shards) {
            self.locked([&] { self.set_shards(std::move(shards)); });
          },
          py::arg("shards"), no_gil)
      .def("pieces", with_shards(&Shards::pieces), no_gil)
      .def("set_shards_apart", locked<Synchronizer>(&Synchronizer::set_shards_apart), no_gil)
      .def("places", with_shards(&Shards::places), no_gil)
      .def("pieces_number", with_shards(&Shards::pieces_number), no_gil)
      .def("have_means", with_shards(&Shards::have_means), no_gil)
      .def("num_writes", locked<Synchronizer>(&Synchronizer::num_writes), no_gil)
      .def("have_other_values", with_shards(&Shards::have_other_values), no_gil)
      .def("compare", with_shards(&Shards::compare), py::arg("numbers"), py::arg("what"), no_gil)
      .def("check_not_captured", with_shards(&Shards::check_not_captured), no_gil)
      .def("note_other_values", with_shards(&Shards::note_other_values), py::arg("parameters"), no_gil)
      .def("noted_other_values", with_shards(&Shards::noted_other_values), no_gil)
      .def("tell", with_shards(&Shards::tell), py::arg("numbers"), py::arg("on_device"), py::arg("what"), no_gil)
      .def("hear", with_shards(&Shards::hear), no_gil)
      .def("meet", with_shards(&Shards::meet), no_gil)
      .def("gradients_are_unchanged", locked<Synchronizer>(&Synchronizer::gradients_are_unchanged), no_gil)
      .def("with_own_gradients", locked<Synchronizer>(&Synchronizer::with_own_gradients), no_gil);

  py::class_<RandomState>(m, "RandomState")
      .def(py::init<>())
      .def("keep", &RandomState::keep)
      .def("put_back", &RandomState::put_back);

  py::class_<ShardedState, EngineState, std::shared_ptr<ShardedState>>(m, "ShardedState")
      .def(py::init(&make_shared<ShardedState, Group>), py::arg("process_group"))
      .def("reduce_scatter", &ShardedState::reduce_scatter, py::arg("identity"), py::arg("name"), py::arg("output"),
           py::arg("input"), py::arg("op"), no_gil)
      .def("all_reduce", &ShardedState::all_reduce, py::arg("identity"), py::arg("name"), py::arg("values"), no_gil);

  py::class_<GatherWork, std::shared_ptr<GatherWork>>(m, "GatherWork").def("wait", &GatherWork::wait, no_gil);
  py::class_<ParameterGather, EngineState, std::shared_ptr<ParameterGather>>(m, "ParameterGather")
      .def(py::init(&make_shared<ParameterGather, Group, std::vector<std::string>, std::string>),
           py::arg("process_group"), py::arg("names"), py::arg("what") = "fully_shard's all-gathers")
      .def("all_gather", &ParameterGather::all_gather, py::arg("module"), py::arg("output"), py::arg("numels"), no_gil)
      .def("module_stats", [](ParameterGather& engine) {
        const auto totals = [&engine] {
          const py::gil_scoped_release no_gil;
          return engine.locked([&] { return engine.totals(); });
        }();
        py::list stats;
        for (const BucketTotals& module : totals) {
          stats.append(stats_of(module));
        }
        return stats;
      });

  m.def(
      "check_agreement",
      [](const Group& group, const std::string& lines, c10::Device device, const std::string& what) {
        return fastsync::check_agreement(group, lines, device, what).number;
      },
      py::arg("process_group"), py::arg("description"), py::arg("device"), py::arg("what") = "what to synchronise",
      no_gil);
  m.def(
      "close_connections", [](const Group& group) { fastsync::close_connections(*group); }, py::arg("process_group"),
      no_gil);
  fastsync::watch_optimizer_calls();
  m.def("optimizer_calls", &fastsync::optimizer_calls);
  m.def("hosts", &fastsync::hosts_of, py::arg("process_group"), no_gil);
  m.def(
      "check_device", [](const Group& group, c10::Device device) { fastsync::check_device(*group, device); },
      py::arg("process_group"), py::arg("device"));
  m.def(
      "kernels", [](const std::string& type) { return fastsync::kernels_on(device_type(type)); },
      py::arg("device_type"));
}
