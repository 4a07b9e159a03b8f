#include "engine/engine_state.h"

#include <utility>

#include "passes/cuda_graphs.h"
#include "transport/agreement.h"
#include "transport/host.h"

namespace fastsync {

EngineState::EngineState(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, const std::string& join)
    : group_(std::move(group)), liveness_(std::make_shared<Liveness>(group_, name, join)), buckets_(group_, liveness_) {
  Host::check_setting();
}

void EngineState::check_not_forked(const char* way_out) const {
  TORCH_CHECK(getpid() == process_id_, "fastsync: this process was forked from the one that attached the engine, and ",
              "the process group did not come along; ", way_out);
}

// ---- settings and agreement -------------------------------------------------------------------------------------

void EngineState::roll_back_step() {
  for (const auto& bucket : buckets_.all()) {
    bucket->roll_back(step_under_way());
  }
  set_step(step_under_way());
}

at::Tensor EngineState::grad_stats() {
  needs_stats_ = true;
  for (const auto& bucket : buckets_.newest()) {
    bucket->take_left_out_stats();
  }
  return buckets_.grad_stats();
}

void EngineState::set_compressions(std::shared_ptr<const CompressionTable> compressions) {
  compressions_ = std::move(compressions);
  agree_anew("its compression was set");
}

void EngineState::begin_weights() {
  agree_anew("a weight was set");
  for (const auto& bucket : buckets_.all()) {
    bucket->set_scale({});  // because it has followed values without weights
  }
}

void EngineState::agree_anew(std::string why) {
  version_ += 1;
  why_agree_ = std::move(why);
}

bool EngineState::have_agreed(const Agreement& agreement,
                              const std::shared_ptr<const CompressionTable>& compressions) const {
  return agreement.compressions == compressions && agreement.version == version_ && !agreement.is_broken;
}

void EngineState::agree(Agreement& agreement, const std::string& what,
                        const std::shared_ptr<const CompressionTable>& compressions, int64_t step,
                        const std::string& lines, c10::Device device) {
  const bool is_broken = agreement.is_broken;
  const std::string why = agreement.number < 0 ? "it is new" : is_broken ? "its newest sync has failed" : why_agree_;
  liveness_->note_agreeing(step, why, agreement.number);
  const std::string text = c10::str(compressions->description, "\nstep ", step, "\n", buckets_.description(), "\n",
                                    compressions->arithmetic(device), lines);
  const auto look = [&] { check_others_come(why); };
  bool has_one_failed = false;
  wait_for_ranks(what, [&] {
    const Agreed agreed = check_agreement(group_, text, device, "what to synchronise", look, is_broken);
    agreement.number = agreed.number;
    has_one_failed = agreed.has_one_failed;
  });
  if (has_one_failed) {
    buckets_.forget_equal_state(agreement);
  }
  agreement.is_broken = false;
  agreement.compressions = compressions;
  agreement.version = version_;
}

void EngineState::check_others_come(const std::string& why) const {
  const std::vector<int64_t> past = liveness_->ranks_past_agreement();
  if (past.empty()) {
    return;
  }
  give_up();
  TORCH_CHECK(false, past.size() == 1 ? "rank " : "ranks ", c10::Join(", ", past), " averaged without agreeing anew, ",
              "so this rank waits in vain. What it did and they did not: ", why);
}

void EngineState::give_up() const {
  for (const auto& bucket : buckets_.all()) {
    bucket->give_up();
  }
}

void EngineState::wait_for_ranks(const std::string& what, const std::function<void()>& call) {
  try {
    guard(c10::str("fastsync: ", what, " failed on rank ", group_->getRank(), " of ", group_->getSize()), *liveness_,
          call);
  } catch (const c10::ValueError&) {
    liveness_->note_rest();
    throw;
  }
}

void EngineState::set_saved(const std::vector<SavedState::Row>& rows) {
  agree_anew("a state was loaded");
  buckets_.set_saved(rows);
}

void EngineState::agree_on_bucket(const Bucket& bucket, const std::string& name,
                                  const std::shared_ptr<const CompressionTable>& compressions,
                                  const std::function<std::string()>& lines) {
  Agreement& agreement = *bucket.agreement;
  if (!have_agreed(agreement, compressions)) {
    agree(agreement, "agreement on " + name, compressions, step_under_way(), lines(), bucket.device());
    liveness_->note_rest();
  }
  pass_agreement(agreement, step_under_way());
}

void EngineState::begin_step() {
  let_go_of_ended_graphs();
  buckets_.times().begin_step();
}

std::shared_ptr<Stopwatch> EngineState::start_bucket(const Bucket& bucket) {
  const c10::Device device = bucket.device();
  is_captured_ = is_capturing(device);
  return buckets_.times().start_bucket(bucket.totals(), device);
}

}  // namespace fastsync
