// The operators have no derivative. A gradient that would be lost is an error: at backward for operators that return
// tensors, at the call for operators that write into their arguments. A tensor that was written has a new version, so
// that autograd notices if it had been saved for a backward.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "writing.h"

namespace {

void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!values[i].isTensor()) continue;
    const at::Tensor& tensor = values[i].toTensor();
    TORCH_CHECK(!(at::GradMode::is_enabled() && tensor.requires_grad()) && !torch::autograd::isFwGradDefined(tensor),
                op.schema().name(), " has no derivative: ", arguments[i].name(),
                ": expected a tensor that does not require grad, got one that does; detach it or use torch.no_grad()");
  }
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  c10::SmallVector<at::Tensor, 3> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias && alias->isWrite() && !values[i].toTensor().is_inference()) written.push_back(values[i].toTensor());
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

constexpr const char* kReturning[] = {"pack_attention", "fill_attention_mask"};

}  // namespace

TORCH_LIBRARY_IMPL(dflash2, Autograd, m) {
  for (const char* name : kReturning) m.impl(name, torch::autograd::autogradNotImplementedFallback());
  for (const char* name : dflash2::kWriting) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_gradients>());
  }
}

TORCH_LIBRARY_IMPL(dflash2, ADInplaceOrView, m) {
  for (const char* name : dflash2::kWriting) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&bump_versions>());
}
