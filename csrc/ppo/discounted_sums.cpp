// torch.ops.fastsync.discounted_sums: what goes backward through time, on the CPU in one pass instead of an operation a
// step. discounted_sums in fastsync/ppo/ppo.py is the specification.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

namespace fastsync {
namespace {

at::Tensor discounted_sums(const at::Tensor& summands, const at::Tensor& decays) {
  TORCH_CHECK_VALUE(summands.dim() == 2 && summands.device().is_cpu() && at::isFloatingType(summands.scalar_type()),
                    "summands: expected real numbers [T, N] on the CPU, got ", summands.scalar_type(), " ",
                    summands.sizes(), " on ", summands.device());
  TORCH_CHECK_VALUE(
      decays.sizes() == summands.sizes() && decays.scalar_type() == summands.scalar_type() && decays.device().is_cpu(),
      "decays: expected ", summands.scalar_type(), " ", summands.sizes(), " like summands, got ", decays.scalar_type(),
      " ", decays.sizes());
  const auto from = summands.contiguous(), by = decays.contiguous();
  auto sums = at::empty_like(from);
  const int64_t num_steps = from.size(0), num_envs = from.size(1);
  AT_DISPATCH_FLOATING_TYPES(from.scalar_type(), "discounted_sums", [&] {
    const auto* summand = from.const_data_ptr<scalar_t>();
    const auto* decay = by.const_data_ptr<scalar_t>();
    auto* sum = sums.data_ptr<scalar_t>();
    for (int64_t i = num_steps * num_envs; i-- > 0;) {
      sum[i] = summand[i] + (i + num_envs < num_steps * num_envs ? decay[i] * sum[i + num_envs] : 0);
    }
  });
  return sums;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def("discounted_sums(Tensor summands, Tensor decays) -> Tensor", discounted_sums);
}

}  // namespace fastsync
