// Shards of the means, which ranks keep in place of whole gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine_state.h"
#include "engine/gradient.h"
#include "engine/gradient_flags.h"
#include "engine/layout.h"
#include "transport/host_copy.h"
#include "transport/shard_group.h"

namespace fastsync {

// Note [Shards]
//   With shard_optimizer each rank keeps the means of its own shards, and steps these. `.grad` stays this rank's
//   own. Ranks end a sync by telling each other the statistics of their shards: so each rank knows the norm, whether a
//   mean is not finite, and which scale fp16 has next. A GradScaler looks at `.grad` alone. So if a mean is not finite,
//   each rank makes a gradient of its own nan, and all scalers skip the same step. On a device all of that stays there.

class Shards final : public Passenger {
 public:
  // All that it is given must outlive it. The flags must come before it in the list of passengers.
  Shards(EngineState& engine, const std::vector<Parameter>& parameters, const Layout& layout, GradientFlags& flags)
      : engine_(engine), parameters_(parameters), layout_(layout), flags_(flags) {}

  // Has these ranks keep shards from the first step on.
  void set_group(std::shared_ptr<ShardGroup> group) { group_ = std::move(group); }
  bool are_kept() const { return group_ != nullptr; }
  const ShardGroup* group() const { return group_.get(); }  // null unless shards are kept

  // ---- between steps ----

  // A piece of a parameter's means: the parameter's index, the piece's first value, and the means.
  using Piece = std::tuple<size_t, int64_t, at::Tensor>;
  // This rank's pieces. They stay in the same memory from step to step, until their number is another.
  std::vector<Piece> pieces();
  int64_t pieces_number();
  // Which values each rank has: a parameter's index, the first value, and how many. By bucket, and by rank.
  using Place = std::tuple<size_t, int64_t, int64_t>;
  std::vector<std::vector<std::vector<Place>>> places();
  // Which parameters have means of the newest step, by parameter.
  std::vector<bool> have_means() { return have_means_; }
  // Whether each parameter's gradient has other values than the newest step has left, by Note [Sampled gradients].
  std::vector<bool> have_other_values();
  // Waits until all ranks are here. Returns the numbers that each of them gives, by rank. `what` is for errors.
  std::vector<std::vector<double>> compare(const std::vector<double>& numbers, const std::string& what);

  // Note [Late numbers]
  //   On a device the host does not wait in a step. So it hears what ranks tell each other before a step, and whether
  //   gradients have other values, when it comes to the next one. By then both have come, unless the host is a whole
  //   step ahead of the device.

  // Throws c10::Error while a CUDA graph is captured, whose replays would tell and hear nothing.
  void check_not_captured();
  // On a device: begins what have_other_values does for some parameters. Returns on the device how many values differ,
  // float64 [1].
  at::Tensor note_other_values(const std::vector<size_t>& parameters);
  // Which of these parameters have other values.
  std::vector<size_t> noted_other_values();
  // On a device: tells all ranks numbers, and behind them those of a float64 tensor there.
  void tell(const std::vector<double>& numbers, const at::Tensor& on_device, const std::string& what);
  // Returns the numbers that each rank has told, as compare does.
  std::vector<std::vector<double>> hear();

  // Waits until all ranks have come here.
  void meet();

  // ---- in a step ----

  void begin(const StepInfo& /*step*/) override { has_told_stats_ = false; }
  // Has the ranks tell each other the statistics of their shards.
  void check(const Sums& sums, const StepInfo& step) override;
  void leave_behind() override;
  // Leaves the gradients what they are, unless a mean is not finite.
  void keep(std::vector<Gradient>& gradients) const;

 private:
  void find_means();
  void check_count(const std::vector<std::vector<double>>& all, size_t count) const;
  bool needs_spoiled(const std::vector<Gradient>& gradients) const;
  void tell_stats(bool has_failed);
  void hear_stats();
  void hear_stats_on(ShardGroupByMessages& device);

  EngineState& engine_;
  const std::vector<Parameter>& parameters_;
  const Layout& layout_;
  GradientFlags& flags_;
  std::shared_ptr<ShardGroup> group_;  // null unless shards are kept
  std::vector<bool> have_means_;
  bool has_told_stats_ = false;

  // On a device:
  at::Tensor num_nonfinite_;                       // of the newest means, on all ranks
  std::vector<std::pair<size_t, int64_t>> noted_;  // parameters, and how many bytes of each noted_differ_ has
  std::vector<size_t> resized_;                    // those whose samples have another length by then
  std::optional<HostCopy> noted_differ_;           // whether each byte differs
  std::optional<HostCopy> told_;                   // the rows of the newest numbers
  size_t num_told_ = 0;
};

}  // namespace fastsync
