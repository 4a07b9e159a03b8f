// PyTorch's operators on the fake device: the CPU's, in the same memory. Views and allocation are its own.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_coalesce_native.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device.h"

namespace fake_device {
namespace {

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                               std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> /*pin_memory*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat> /*format*/) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const auto needed = (tensor->numel() + tensor->storage_offset()) * tensor->itemsize();
  if (needed > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    self.storage().set_data_ptr_noswap(allocator()->allocate(needed));
    self.storage().set_nbytes(needed);
  }
  return self;
}

// From the host or to it without waiting only where the memory there is pinned, as on CUDA.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& ours = is_ours(to) ? to : from;
  const c10::DeviceGuard guard(ours.device());
  const auto stream = current_stream(ours.device());
  std::vector<Touch> touches;
  Event before;
  if (is_ours(from) && is_ours(to) && from.device() != to.device()) {
    record(before, current_stream(from.device()));
    block(before, stream);
  }
  at::Tensor target = is_ours(to) ? on_host(to) : to;
  target.copy_(is_ours(from) ? on_host(from) : from);
  for (const auto& [tensor, is_written] : {std::pair(from, false), std::pair(to, true)}) {
    if (is_ours(tensor)) {
      add_touches(touches, tensor, is_written);
    }
  }
  run(stream, "copy_", touches);
  if (is_ours(from) && is_ours(to)) {
    Event after;
    record(after, stream);
    block(after, current_stream(from.device()));
  } else if (const at::Tensor& host = is_ours(to) ? from : to; !non_blocking || !is_pinned(host.const_data_ptr())) {
    wait_on_host(stream, is_ours(to) ? "copy_ from the host" : "copy_ to the host");
  }
  return to;
}

void record_stream_of(at::Tensor& tensor, at::Stream stream) { record_stream(tensor.storage().data(), stream); }

// One call of one of the CPU's operators on our tensors.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    lend_arguments();
    const c10::OptionalDeviceGuard guard(device_);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (const auto& [ours, host] : lent_) {
      if (ours.sizes() != host.sizes()) {  // an output that came empty
        ours.resize_(host.sizes());
        fill(ours, host);
      }
    }
    bool reads_on_host = name() == "aten::nonzero" || name() == "aten::masked_select";  // sizes follow from values
    const auto& returns = op_.schema().returns();
    const size_t first = stack_->size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      reads_on_host |= !take_back((*stack_)[first + i]);
    }
    const auto stream = current_stream(device_.value_or(current_device()));
    fake_device::run(stream, name(), touches_);
    if (reads_on_host) {
      wait_on_host(stream, name());
    }
  }

 private:
  std::string name() const { return op_.schema().name(); }

  at::Tensor lend(const at::Tensor& tensor, bool is_written) {
    if (!is_ours(tensor)) {
      return tensor;
    }
    device_ = device_.value_or(tensor.device());
    add_touches(touches_, tensor, is_written);
    const bool may_be_resized = is_written && tensor.numel() == 0;
    lent_.emplace_back(
        tensor, may_be_resized ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : on_host(tensor));
    return lent_.back().second;
  }

  void lend_arguments() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack_)[first + i];
      const auto* alias = arguments[i].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      if (value.isTensor()) {
        value = lend(value.toTensor(), is_written);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) {
          list.push_back(lend(tensor, is_written));
        }
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& tensor : value.toOptionalTensorVector()) {
          list.push_back(tensor ? std::optional(lend(*tensor, is_written)) : std::nullopt);
        }
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == kType) {
        device_ = value.toDevice();
        value = c10::Device(c10::kCPU);
      }
    }
  }

  at::Tensor take_back(const at::Tensor& host) {
    for (const auto& [ours, lent] : lent_) {
      if (lent.is_same(host)) {
        return ours;
      }
      TORCH_CHECK(!host.is_alias_of(lent), "the fake device has no view operator ", name());
    }
    if (!host.defined()) {
      return host;
    }
    const at::Tensor ours = at::empty_strided(host.sizes(), host.strides(), host.options().device(current_device()));
    fill(ours, host);
    return ours;
  }

  void fill(const at::Tensor& ours, const at::Tensor& host) {
    on_host(ours).copy_(host);
    add_touches(touches_, ours, /*is_written=*/true);
  }

  // False for what is no tensor, which the host has read.
  bool take_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = take_back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(take_back(tensor));
      }
      value = list;
    } else {
      return false;
    }
    return true;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::optional<c10::Device> device_;
  std::vector<std::pair<at::Tensor, at::Tensor>> lent_;  // ours, and the same on the host
  std::vector<Touch> touches_;
};

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { HostCall(op, stack).run(); }

// Adds up the values of a row on the host. On CUDA, too, the host waits, for it has to know how many rows there are.
at::Tensor coalesce(const at::Tensor& self) {
  const auto host = at::_sparse_coo_tensor_unsafe(self._indices().cpu(), self._values().cpu(), self.sizes()).coalesce();
  return at::_sparse_coo_tensor_unsafe(host._indices().to(self.device()), host._values().to(self.device()),
                                       self.sizes(), /*options=*/{}, /*is_coalesced=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", &record_stream_of);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_coalesce", &coalesce);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("copy_", &at::native::copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("values", &at::native::values_sparse);
}

}  // namespace
}  // namespace fake_device
