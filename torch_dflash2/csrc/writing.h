// The operators that write into their arguments.
#pragma once

namespace dflash2 {

inline constexpr const char* kWriting[] = {"pack_attention.out", "fill_attention_mask.out", "commit_kv",
                                           "set_mask_rows"};

}  // namespace dflash2
