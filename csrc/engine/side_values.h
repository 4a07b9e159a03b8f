// What travels beside the gradients of a step's last bucket: one vector of float32 slots, summed over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fastsync {

// The slots are: a flag for each parameter, the step check's stamp, and named values.
class SideValues {
 public:
  // ---- flags: which parameters have a gradient, here and on any rank ----

  // 1 where there is a new gradient, 0 where there is one of an earlier sync. Where there is none, so little that all
  // ranks together are less than 1.
  void lay_out(size_t num_flags, int64_t num_ranks);
  // Before a sync: no rank has any.
  void clear_flags() { flags_.assign(flags_.size(), none_); }
  void set_flag(size_t flag, bool is_here, bool is_kept) { flags_[flag] = is_here ? 1.0F : (is_kept ? 0.0F : none_); }
  bool is_here(size_t flag) const { return flags_[flag] == 1.0F; }
  // After arrive. Reads the sums on the host, once a sync, only where a gradient is missing here: nothing else tells
  // whether it stays missing. A CUDA graph repeats what held in the step before it was captured. The parameter is named
  // in errors.
  bool on_some_rank(size_t flag, const std::string& parameter);
  // Of a gradient that is new on none: whether each has one of an earlier sync.
  bool is_kept_everywhere(size_t flag) const { return counts_.const_data_ptr<float>()[flag] == 0.0F; }

  // ---- named values ----

  using Tensors = std::map<std::string, at::Tensor>;

  // For the next sync, in place of an earlier one of that name. A name keeps its slots once the ranks have agreed on
  // it, so that one that some ranks leave empty, as nan, does not change what is sent.
  void put(const std::string& name, at::Tensor value);
  bool has_slots(const std::string& name, const at::Tensor& value) const;
  // Lines to agree on, of all that wait and have no slots, or those of another shape; then they get slots.
  std::string newcomers() const;
  void make_slots();

  // ---- one sync ----

  // The vector, on the device. Without a stamp the one before takes its slots. counts: the named values of this rank
  // do. A rank that has failed leaves all but the flags empty. Throws c10::ValueError where a CUDA graph is captured
  // that would repeat the value of one of them.
  at::Tensor to_send(std::optional<std::vector<float>> stamp, bool counts, bool has_failed, c10::Device device);
  // The sums over the ranks. They may lie in memory that the next sync writes to.
  void arrive(const at::Tensor& sums, bool is_captured);
  // Of these, the stamps; undefined where none were sent.
  at::Tensor stamps() const;
  // And the named values, of which by_name gives those that this rank has sent.
  at::Tensor named() const { return sums_.narrow(0, num_fixed(), sums_.numel() - num_fixed()); }
  Tensors by_name(const at::Tensor& named) const;

 private:
  at::Tensor flags_and_stamp(c10::Device device);
  at::Tensor slots_of(const std::string& name, at::IntArrayRef shape, bool counts, c10::Device device) const;
  int64_t num_fixed() const { return static_cast<int64_t>(flags_.size() + stamp_.size()); }

  float none_ = 0.0F;
  std::vector<float> flags_;
  std::vector<float> stamp_;
  bool has_new_stamp_ = false;
  std::vector<float> fixed_;  // what is on the device: flags and stamp
  at::Tensor fixed_on_device_;
  std::vector<at::Tensor> captured_;  // which CUDA graphs go on reading

  std::map<std::string, std::vector<int64_t>> slots_;  // their shapes
  Tensors waiting_;
  std::set<std::string> given_in_graph_;  // by the graph itself, anew in each replay
  Tensors sent_;

  at::Tensor sums_;
  at::Tensor counts_;  // the sums of flags, once they are read
  bool is_captured_ = false;
  int64_t num_waits_ = 0;  // in a row, of the host for the device
};

}  // namespace fastsync
