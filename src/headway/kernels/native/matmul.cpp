// The tiles of quantized weights, for one instruction set (HW_ISA, HW_NS).
#define HW_TILES_HERE
#include "matmul.h"

namespace HW_NS {
HW_QUANTIZED_TILES(HW_QUANTIZED_TILE)
}  // namespace HW_NS
