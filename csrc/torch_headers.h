// The headers of torch that most files take, for g++ to read them once. No file includes this one: see
// Note [Precompiled headers] in tools/compile.py.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
