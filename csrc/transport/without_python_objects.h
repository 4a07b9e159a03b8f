// Keeps Python objects out of the process group's works. torch's backward() puts one into its thread's state, and each
// Work keeps a copy of that state. If a thread of the group were a Work's last owner, it would wait for the GIL. It
// would abort the process if the interpreter ended meanwhile.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>

#include <utility>

namespace fastsync {

class WithoutPythonObjects {
 public:
  WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state({}); }
  ~WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(saved_)); }
  WithoutPythonObjects(const WithoutPythonObjects&) = delete;
  WithoutPythonObjects& operator=(const WithoutPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects saved_ = at::impl::ThreadLocalPythonObjects::get_state();
};

}  // namespace fastsync
