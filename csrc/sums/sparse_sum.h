// A SparseSum averages one sparse gradient, such as that of an embedding with sparse=True.
//
// Note [Sparse gradients]
//   A sparse gradient has values for some rows of its parameter, and each rank may have other rows. So ranks gather the
//   rows of all ranks, and each rank adds up by itself, in the order of ranks. The result has each row that some rank
//   has, once. Two messages go to every other rank:
//     header   It tells how many rows follow, and the scale of their values. Side values travel in it.
//     rows     They are the indices of rows, and behind them the values of these rows. The messages of all ranks are as
//              long as that of the rank with the most rows.
//   A rank that has failed tells nan, and sends no rows. Then nobody waits for rows, and the result is nan in one row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "sums/sum_work.h"
#include "transport/team.h"

namespace fastsync {

class SparseSum final : public SumWork {
 public:
  // `values` holds those of the gradient's rows, [rows, ...], and `rows` their indices, ascending: int64 [rows]. The
  // gradient becomes the mean. It takes two tags. The host waits for the ranks in receive, on a device too.
  SparseSum(FlatGradients values, at::Tensor rows, at::Tensor gradient, std::shared_ptr<Team> team, int tag,
            bool has_failed);

  void send() override;
  bool may_be_sent_again() const override { return !gradients_.device.is_cpu(); }
  bool receive_sends() const override { return true; }
  void receive(const std::function<void()>& on_reduced) override;
  int64_t sent_bytes() const override { return sent_bytes_; }

 private:
  // Sums are sparse and coalesced: [rows of the parameter, width].
  at::Tensor new_sum(const at::Tensor& rows, const at::Tensor& values) const;
  at::Tensor sum_of_failure() const;
  at::Tensor gather(const at::Tensor& numbers);
  void take(const at::Tensor& sum);

  at::Tensor rows_;
  at::Tensor gradient_;
  const std::shared_ptr<Team> team_;
  const int tag_;
  const bool has_failed_;
  const int64_t width_;  // how many values a row has
  at::Tensor headers_;   // float64 [ranks, numbers], see HeaderNumber
  std::unique_ptr<Transfer> headers_come_;
  int64_t sent_bytes_ = 0;
};

}  // namespace fastsync
