#include "transport/cgroup.h"

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace fastsync {

namespace {

constexpr const char* kRoot = "/sys/fs/cgroup";

// In a file of lines of a key and a value each, or of a value alone, which is the empty key's. -1 where it is not there
// or no number.
int64_t value_in(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  while (key.empty() ? static_cast<bool>(file >> value) : static_cast<bool>(file >> word >> value)) {
    if (word == key) {
      return value;
    }
  }
  return -1;
}

// The least of what the process's group and those around it allow, by their folders. In a container the process may
// have a path that is not there: then the groups count that are.
int64_t least(const std::string& controller, c10::function_ref<int64_t(const std::string&)> limit_in) {
  int64_t least = INT64_MAX;
  std::ifstream file("/proc/self/cgroup");
  std::string number;
  std::string controllers;
  std::string path;
  while (std::getline(file, number, ':') && std::getline(file, controllers, ':') && std::getline(file, path)) {
    const bool is_version_2 = controllers.empty();
    if (!is_version_2 && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) {
      continue;
    }
    const std::string root = std::string(kRoot) + (is_version_2 ? "" : "/" + controller);
    std::string folder = root + path;
    for (; folder.size() > root.size(); folder.resize(folder.rfind('/'))) {
      least = std::min(least, limit_in(folder + "/"));
    }
    least = std::min(least, limit_in(root + "/"));
  }
  return least;
}

int64_t memory_left(int64_t most, int64_t used, int64_t files) {
  return most < 0 || used < 0 ? INT64_MAX : most - used + std::max<int64_t>(files, 0);
}

int64_t cpus(int64_t quota, int64_t period) {
  return quota <= 0 || period <= 0 ? INT64_MAX : (quota + period - 1) / period;
}

int64_t cpus_in(const std::string& folder) {
  std::ifstream file(folder + "cpu.max");
  int64_t quota = 0;
  int64_t period = 0;
  return file >> quota >> period ? cpus(quota, period)
                                 : cpus(value_in(folder + "cpu.cfs_quota_us"), value_in(folder + "cpu.cfs_period_us"));
}

}  // namespace

int64_t memory_left_in_cgroups() {
  return least("memory", [](const std::string& folder) {
    const std::string statistics = folder + "memory.stat";
    return std::min(memory_left(value_in(folder + "memory.max"), value_in(folder + "memory.current"),
                                value_in(statistics, "inactive_file")),
                    memory_left(value_in(folder + "memory.limit_in_bytes"), value_in(folder + "memory.usage_in_bytes"),
                                value_in(statistics, "total_inactive_file")));
  });
}

int64_t cpus_of_cgroups() { return least("cpu", cpus_in); }

}  // namespace fastsync
