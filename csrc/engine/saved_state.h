// What is saved of each parameter between a checkpoint, or an arrangement of buckets, and the next one: the fp16 scale
// of its bucket, and what error feedback keeps of its gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace fastsync {

// Weak, so that no model is kept alive, and no other can take its address while it is remembered here.
using ParameterId = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

class SavedState {
 public:
  // A parameter, its scale and its residual.
  using Row = std::tuple<at::Tensor, std::optional<double>, std::optional<at::Tensor>>;

  SavedState() = default;
  explicit SavedState(const std::vector<Row>& rows);
  // Of the parameters that still live.
  std::vector<Row> rows() const;
  // Tells whether ranks were given the same scales, for check_agreement.
  const std::string& description() const { return description_; }

  // Takes over the scale of a bucket that holds these parameters; where it has none, they lose theirs. Waits for the
  // device.
  void record_scale(const std::vector<ParameterId>& parameters, const at::Tensor& scale);
  // And what is defined of its residuals, one for each parameter or none at all.
  void record_residuals(const std::vector<ParameterId>& parameters, const std::vector<at::Tensor>& residuals);

  // Where a bucket of these parameters starts, as float32 [1] on the device: with the smallest of their scales, so that
  // none saturates. Undefined where one is unknown; then the gradients decide.
  at::Tensor smallest_scale(const std::vector<ParameterId>& parameters, c10::Device device) const;
  // Gives the residuals of these parameters away, undefined where there is none; nothing where there is none of any.
  std::vector<at::Tensor> take_residuals(const std::vector<ParameterId>& parameters, c10::Device device);

 private:
  struct Entry {
    ParameterId id;
    std::optional<double> scale = {};
    at::Tensor residual = {};
  };

  Entry& entry_of(const ParameterId& id);

  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::string description_ = "no saved scales";
};

}  // namespace fastsync
