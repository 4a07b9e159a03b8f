// Which parameters have a gradient, here and on any rank: a number for each place among the parameters travels beside
// the last bucket's gradients, and behind them the step_check's stamp. It is 1 where there is a new gradient, 0 where
// there is the one of an earlier sync, and where there is none so little that all ranks together are less than 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fastsync {

class UnusedParameters {
 public:
  void lay_out(size_t num_places, int64_t num_ranks);

  // Before a sync: nothing is here.
  void clear() { here_.assign(here_.size(), none_); }
  void set(size_t place, bool is_here, bool is_kept) { here_[place] = is_here ? 1.0F : (is_kept ? 0.0F : none_); }
  bool is_here(size_t place) const { return here_[place] == 1.0F; }

  // What travels, on the device, without a stamp with the one before. Made anew only when it changes, which a CUDA
  // graph cannot: then it throws c10::Error.
  at::Tensor flags(std::optional<std::vector<float>> stamp, c10::Device device);

  // The sums over the ranks have come.
  void arrive(bool is_captured);
  // The stamps' among them; undefined where none were sent.
  at::Tensor stamps(const at::Tensor& sums) const;
  // Reads the sums on the host, once a sync, only where a gradient is missing here: nothing else tells whether it stays
  // missing. A CUDA graph repeats what held in the step before it was captured. The parameter is named in errors.
  bool on_some_rank(size_t place, const at::Tensor& sums, const std::string& parameter);
  // Of a gradient that is new on none: whether each has one of an earlier sync.
  bool is_kept_everywhere(size_t place) const { return counts_.const_data_ptr<float>()[place] == 0.0F; }

 private:
  float none_ = 0.0F;
  std::vector<float> here_;
  std::vector<float> stamp_;
  bool has_new_stamp_ = false;
  std::vector<float> flagged_;  // what flags_ holds
  at::Tensor flags_;
  std::vector<at::Tensor> captured_flags_;  // which CUDA graphs go on reading
  at::Tensor counts_;                       // the sums, once they are read
  bool is_captured_ = false;
  int64_t num_waits_ = 0;  // in a row, of the host for the device
};

}  // namespace fastsync
