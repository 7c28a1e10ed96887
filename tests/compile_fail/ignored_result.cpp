// expect: nodiscard
#include "kvant/status.h"

kvant::Result<int> work() { return 0; }

int main() {
#ifdef KVANT_MUST_FAIL
  work();
#else
  return work().ok() ? 0 : 1;
#endif
}
