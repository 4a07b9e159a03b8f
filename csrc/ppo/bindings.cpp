// The module fastsync._ppo has the trainer's operators. They bypass torch's dispatcher, which takes longer than some of
// them compute.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "ppo/operators.h"

PYBIND11_MODULE(_ppo, m) {
  m.def("perceptron", torch::wrap_pybind_function_no_gil(fastsync::perceptron));
  m.def("categorical", torch::wrap_pybind_function_no_gil(fastsync::categorical));
  m.def("choose", torch::wrap_pybind_function_no_gil(fastsync::choose));
  m.def("ppo_objective", torch::wrap_pybind_function_no_gil(fastsync::ppo_objective));
  m.def("ppo_minibatch", torch::wrap_pybind_function_no_gil(fastsync::ppo_minibatch));
}
