// Tensors that are negated or conjugated only when read. What is read is resolved; what is written cannot be, and is
// refused. (torch's own fallback for these expects written arguments to be returned, which ours are not.)
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "writing.h"

namespace {

template <c10::DispatchKey key>
void resolve(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (!value.isTensor() || !(value.toTensor().is_neg() || value.toTensor().is_conj())) continue;
    const auto* alias = arguments[i].alias_info();
    TORCH_CHECK(!(alias && alias->isWrite()), "invalid DFlash2 attention geometry: ", op.schema().name(), ": ",
                arguments[i].name(),
                ": expected a plain tensor, as it is written in place, got a view that is negated ",
                "or conjugated when read");
    value = value.toTensor().resolve_neg().resolve_conj();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(dflash2, Negative, m) {
  for (const char* name : dflash2::kWriting) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&resolve<c10::DispatchKey::Negative>>());
  }
}

TORCH_LIBRARY_IMPL(dflash2, Conjugate, m) {
  for (const char* name : dflash2::kWriting) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&resolve<c10::DispatchKey::Conjugate>>());
  }
}
