// A LowRankSum adds up gradients as products of thin factors, which are all that travels of them.
//
// Note [Low rank]
//   This is PowerSGD (T. Vogels, S. P. Karimireddy and M. Jaggi, arXiv 1905.13727, 2019). The memory of a gradient is
//   a matrix: its rows are those of the outermost dimension. M is this rank's matrix plus its residual. A step has two
//   sums, one after the other:
//     left factors    Each rank sends P = M Q. Q has few columns, is orthonormal, and is the same on all ranks. Then
//                     every rank makes the columns of the mean of P orthonormal.
//     right factors   Each rank sends M^T P. Their mean is the next step's Q, which is made orthonormal then.
//   The result is P Q^T, the mean of M projected on the columns of P. The residual becomes M - P Q^T, so the means of
//   all steps and the residuals add up to what the ranks had. Vectors travel as they are, with the left factors. So
//   does a matrix whose factors have no fewer values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "sums/planned_sum.h"
#include "sums/sum_work.h"

namespace fastsync {

struct Sides {
  int64_t rows;
  int64_t columns;

  bool operator==(const Sides& other) const = default;
};

// Returns the sides of the matrix whose factors travel for gradients of this tensor. Unset if these travel as they are.
std::optional<Sides> low_rank_sides(const at::Tensor& tensor, int64_t rank);

// Returns the right factor that a matrix of so many columns begins with. It is the same on all ranks.
at::Tensor first_factor(int64_t columns, int64_t rank, const at::TensorOptions& options);

// A bucket keeps this from sum to sum.
struct LowRankState {
  std::vector<at::Tensor> factors = {};  // the newest right factors, by gradient; undefined before the first step
  // On a CPU, the memory of M, and that of one matrix P Q^T. New memory would cost page faults.
  at::Tensor matrices = {};
  at::Tensor product = {};
  SumMemory of_left = {};
  SumMemory of_right = {};
};

class LowRankSum final : public SumWork {
 public:
  // Makes a sum of tensors, each of which becomes the mean times FlatGradients::mean_factor.
  using MakeSum =
      std::function<std::unique_ptr<SumWork>(std::vector<at::Tensor>, SumMemory&, const at::Tensor& side_values)>;

  // The gradients must have residuals. The state must outlive the sum.
  LowRankSum(FlatGradients gradients, LowRankState& state, int64_t rank, MakeSum make_sum);

  void send() override;
  bool may_be_sent_again() const override { return left_sum_->may_be_sent_again(); }
  bool needs_driving() const override { return left_sum_->needs_driving(); }
  void drive() override { left_sum_->drive(); }
  bool receive_sends() const override { return !groups_.empty(); }
  void receive(const std::function<void()>& on_reduced) override;
  int64_t sent_bytes() const override;

 private:
  // The matrices with the same sides.
  struct Group {
    Sides sides;
    std::vector<size_t> indices = {};  // of their gradients
    at::Tensor left = {};              // [matrices, rows, rank]
    at::Tensor right = {};             // [matrices, columns, rank]
  };

  Group& group_of(Sides sides);
  at::Tensor take_memory(at::Tensor& kept, int64_t numel) const;
  at::Tensor values(size_t index) const { return part(memory_, index); }
  at::Tensor residual(size_t index) const { return part(gradients_.residual, index); }
  at::Tensor part(const at::Tensor& memory, size_t index) const;
  at::Tensor matrix(const Group& group, size_t place) const;
  void gather(size_t index) const;
  void sum_right_factors(const std::function<void()>& on_reduced);
  void unpack(size_t index, const at::Tensor& values) const;
  void unpack_product(const Group& group, size_t place, const at::Tensor& is_finite, at::Tensor product) const;

  LowRankState& state_;
  const MakeSum make_sum_;
  std::vector<Group> groups_;
  std::vector<size_t> whole_;  // the gradients that travel as they are
  std::unique_ptr<SumWork> left_sum_;
  std::unique_ptr<SumWork> right_sum_;
};

}  // namespace fastsync
