#include "engine/failure.h"

#include <c10/util/Exception.h>

#include <exception>

namespace fastsync {

void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call) {
  std::string why;
  try {
    return call();
  } catch (const c10::ValueError&) {
    throw;
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  const std::string told = liveness.who_is_missing();
  const auto says = [&](const char* text) { return told.find(text) != std::string::npos; };
  const char* const join = says("of the engine of parameter") ? "with sync.join():"
                           : says("of a DDP hook")            ? "with Join([ddp_model]):"
                                                              : nullptr;
  const bool may_have_no_batches = join != nullptr && (says(": in no sync") || says(": no answer"));
  const bool did_it_alone = says("agreeing before") && says("averaging in");
  TORCH_CHECK(false, beginning, why, told,
              did_it_alone ? ". Do what is said after 'because' on every rank, between the same steps, or on none" : "",
              may_have_no_batches ? c10::str(". Where ranks have different numbers of batches, put the training loop ",
                                             "inside `", join, "`")
                                  : "");
}

}  // namespace fastsync
