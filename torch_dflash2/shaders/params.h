// What the host tells a kernel about one call: read by the shader and by csrc/mps.mm, so that the two cannot drift
// apart.
#ifndef DFLASH2_PARAMS_H
#define DFLASH2_PARAMS_H

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

struct PackParams {
  uint32_t q_heads, kv_heads, head_dim, rows, window;
  uint32_t aligned;  // every buffer starts on a 16-byte boundary
};

struct MaskParams {
  uint32_t q_heads, rows, window;
  uint32_t causal;  // a row sees no later row of its block
};

struct CommitParams {
  uint32_t kv_heads, head_dim, max_count, window;
  uint32_t aligned;
};

struct MaskRowsParams {
  uint32_t rows, hidden_size;
};

#ifndef __METAL_VERSION__
static_assert(sizeof(PackParams) == 24 && sizeof(MaskParams) == 16 && sizeof(CommitParams) == 20 &&
                  sizeof(MaskRowsParams) == 8,
              "the shader reads these bytes");
#endif

#endif  // DFLASH2_PARAMS_H
