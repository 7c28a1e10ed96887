// A page number is not a layer number.
// expect: could not convert|no viable conversion|no matching function
#include "kvant/types.h"

int layer_index(kvant::LayerId layer) { return layer.value; }

int main() {
#ifdef KVANT_MUST_FAIL
  return layer_index(kvant::PageId{0});
#else
  return layer_index(kvant::LayerId{0});
#endif
}
