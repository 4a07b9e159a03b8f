#include "engine/failure.h"

#include <c10/util/Exception.h>

#include <exception>

namespace fastsync {

void raise_failure(const std::string& beginning, const std::string& why, Liveness& liveness) {
  const std::string told = liveness.who_is_missing();
  const auto says = [&](const char* text) { return told.find(text) != std::string::npos; };
  const char* const join = says("of the engine of parameter") ? "with sync.join():"
                           : says("of a DDP hook")            ? "with Join([ddp_model]):"
                                                              : nullptr;
  const bool may_have_no_batches = join != nullptr && (says(": in no sync") || says(": no answer"));
  TORCH_CHECK(false, beginning, why, told,
              may_have_no_batches ? c10::str(". Where ranks have different numbers of batches, put the training loop ",
                                             "inside `", join, "`")
                                  : "");
}

void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError&) {
    throw;
  } catch (const c10::Error& error) {
    raise_failure(beginning, error.what_without_backtrace(), liveness);
  } catch (const std::exception& error) {
    raise_failure(beginning, error.what(), liveness);
  }
}

}  // namespace fastsync
