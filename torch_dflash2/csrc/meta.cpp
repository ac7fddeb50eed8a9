// Meta kernels: the same checks and the same outputs as on a real device, with symbolic sizes and no work.
#include "operators.h"

namespace {

struct MetaKernels {
  template <class... Arguments>
  static void pack_attention(const Arguments&...) {}
  template <class... Arguments>
  static void fill_attention_mask(const Arguments&...) {}
  template <class... Arguments>
  static void commit_kv(const Arguments&...) {}
  template <class... Arguments>
  static void set_mask_rows(const Arguments&...) {}
};

}  // namespace

TORCH_LIBRARY_IMPL(dflash2, Meta, m) { dflash2::Operators<MetaKernels, c10::SymInt>::register_on(m); }
