#include "engine/optimizer_calls.h"

#include <ATen/record_function.h>

#include <atomic>
#include <memory>
#include <string_view>

namespace fastsync {

namespace {

constexpr std::string_view kScope = "Optimizer.step#";  // the class of the optimizer follows

thread_local std::vector<int64_t> calls;
std::atomic<int64_t> num_calls{0};

// Is there from the beginning of a call to its end.
struct Call final : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& scope) {
  if (std::string_view(scope.name()).substr(0, kScope.size()) != kScope) {
    return nullptr;
  }
  calls.push_back(num_calls++);
  return std::make_unique<Call>();
}

void end(const at::RecordFunction& /*scope*/, at::ObserverContext* call) {
  if (call != nullptr && !calls.empty()) {
    calls.pop_back();
  }
}

}  // namespace

void watch_optimizer_calls() {
  static const auto once =
      at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::USER_SCOPE}));
  (void)once;
}

const std::vector<int64_t>& optimizer_calls() { return calls; }

}  // namespace fastsync
