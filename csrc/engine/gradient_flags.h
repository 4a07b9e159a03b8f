// Which parameters have a gradient, on this rank and on any: numbers that are summed over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fastsync {

// A flag is 1 if the parameter has a new gradient, and 0 if it has one of an earlier sync. Without any it is so little
// that the flags of all ranks together are less than 1.
class GradientFlags {
 public:
  void lay_out(size_t num_flags, int64_t num_ranks) {
    none_ = 1.0F / (8.0F * static_cast<float>(num_ranks));
    flags_.assign(num_flags, none_);
  }

  // ---- before a sync ----

  // No parameter has a gradient.
  void clear() { flags_.assign(flags_.size(), none_); }
  void set(size_t flag, bool is_new, bool exists) { flags_[flag] = is_new ? 1.0F : (exists ? 0.0F : none_); }
  const std::vector<float>& values() const { return flags_; }

  // ---- after it ----

  // The sums over the ranks have come, with others behind them. They may lie in memory that the next sync writes to.
  void arrive(const at::Tensor& sums, bool is_captured);
  // Whether some rank has a new gradient. Reads the sums on the host, once a sync, only if this rank has none: nothing
  // else tells whether the parameter stays without. A CUDA graph repeats what held in the step before it was captured.
  // The parameter is named in errors.
  bool on_some_rank(size_t flag, const std::string& parameter);
  // If none has: whether each rank has a gradient of an earlier sync.
  bool is_kept_everywhere(size_t flag) const { return counts_.const_data_ptr<float>()[flag] == 0.0F; }

 private:
  float none_ = 0.0F;
  std::vector<float> flags_;
  at::Tensor sums_;
  at::Tensor counts_;  // the sums on the host, once they are read
  bool is_captured_ = false;
  int64_t num_waits_ = 0;  // in a row, of the host for the device
};

}  // namespace fastsync
