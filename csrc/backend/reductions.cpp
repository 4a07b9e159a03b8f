#include "backend/reductions.h"

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <functional>
#include <type_traits>

#include "backend/half_sums.h"

namespace fastsync {

namespace {

using Op = c10d::ReduceOp::RedOpType;

struct Least {
  template <class T>
  T operator()(const T& a, const T& b) const {
    return std::min(a, b);
  }
};

struct Greatest {
  template <class T>
  T operator()(const T& a, const T& b) const {
    return std::max(a, b);
  }
};

template <class T, class Operation>
void reduce(const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes) {
  const auto* const left = reinterpret_cast<const T*>(a);
  const auto* const right = reinterpret_cast<const T*>(b);
  auto* const result = reinterpret_cast<T*>(out);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(T));
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    result[i] = static_cast<T>(Operation()(left[i], right[i]));
  }
}

template <class T>
Reduction reduction_of_type(Op op) {
  switch (op) {
    case Op::SUM:
    case Op::AVG:
      return &reduce<T, std::plus<>>;
    case Op::PRODUCT:
      return &reduce<T, std::multiplies<>>;
    case Op::MIN:
      return &reduce<T, Least>;
    case Op::MAX:
      return &reduce<T, Greatest>;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Op::BAND:
        return &reduce<T, std::bit_and<>>;
      case Op::BOR:
        return &reduce<T, std::bit_or<>>;
      case Op::BXOR:
        return &reduce<T, std::bit_xor<>>;
      default:
        break;
    }
  }
  return nullptr;
}

Reduction reduction_of(at::ScalarType dtype, Op op) {
  const bool is_sum = op == Op::SUM || op == Op::AVG;
  switch (dtype) {
    case at::kFloat:
      return reduction_of_type<float>(op);
    case at::kDouble:
      return reduction_of_type<double>(op);
    case at::kHalf:
      return is_sum ? &add_halves : reduction_of_type<c10::Half>(op);
    case at::kBFloat16:
      return is_sum ? &add_bfloat16s : reduction_of_type<c10::BFloat16>(op);
    case at::kChar:
      return reduction_of_type<int8_t>(op);
    case at::kByte:
    case at::kBool:
      return reduction_of_type<uint8_t>(op);
    case at::kInt:
      return reduction_of_type<int32_t>(op);
    case at::kLong:
      return reduction_of_type<int64_t>(op);
    default:
      return nullptr;
  }
}

}  // namespace

Reducing::Reducing(const char* name, at::ScalarType dtype, const c10d::ReduceOp& reduce_op, int64_t num_ranks)
    : op(reduce_op), size(num_ranks), real(dtype) {
  const bool is_sum = op == Op::SUM || op == Op::AVG;
  real = at::isComplexType(dtype) && is_sum ? at::toRealValueType(dtype) : dtype;
  TORCH_CHECK(op != Op::PREMUL_SUM, "fastsync: ", name, ": cannot use ReduceOp.PREMUL_SUM");
  TORCH_CHECK(op != Op::AVG || at::isFloatingType(real), "fastsync: ", name, ": cannot use ReduceOp.AVG with ", dtype);
  function = reduction_of(real, op);
  const bool needs_integers = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  TORCH_CHECK(function != nullptr || !needs_integers, "fastsync: ", name,
              ": cannot use a bitwise ReduceOp with non-integral dtype ", dtype);
  TORCH_CHECK(function != nullptr, "fastsync: ", name, ": cannot reduce ", dtype);
  number = static_cast<int64_t>(op) * 256 + static_cast<int64_t>(real);
}

void Reducing::finish(const at::Tensor& sum) const {
  if (op == Op::AVG) {
    (sum.is_complex() ? at::view_as_real(sum) : sum).div_(size);
  }
}

}  // namespace fastsync
