#include "transport/cgroup.h"

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace fastsync {

namespace {

// The least of what the process's group and those around it allow, by their folders. In a container the process may
// have a path that is not there: then the groups count that are.
int64_t least(c10::function_ref<int64_t(const std::string& folder)> limit_in) {
  const std::string root = "/sys/fs/cgroup";
  const std::string is_version_2 = "0::";
  int64_t least = limit_in(root);
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(is_version_2)) {
      for (std::string path = line.substr(is_version_2.size()); !path.empty(); path.resize(path.rfind('/'))) {
        least = std::min(least, limit_in(root + path));
      }
    }
  }
  return least;
}

int64_t memory_left_in(const std::string& folder) {
  int64_t most = 0;
  int64_t used = 0;
  if (!(std::ifstream(folder + "/memory.max") >> most && std::ifstream(folder + "/memory.current") >> used)) {
    return INT64_MAX;
  }
  int64_t files = 0;
  std::ifstream statistics(folder + "/memory.stat");
  for (std::string key; key != "inactive_file" && statistics >> key >> files;) {
  }
  return most - used + (statistics ? files : 0);
}

int64_t cpus_in(const std::string& folder) {
  int64_t quota = 0;
  int64_t period = 0;
  return std::ifstream(folder + "/cpu.max") >> quota >> period && period > 0 ? (quota + period - 1) / period
                                                                             : INT64_MAX;
}

}  // namespace

int64_t memory_left_in_cgroups() { return least(memory_left_in); }

int64_t cpus_of_cgroups() { return least(cpus_in); }

}  // namespace fastsync
