// A failure cannot be overlooked: a Status that nobody looks at is a warning, and warnings are errors.
// expect: nodiscard
#include "kvant/status.h"

kvant::Status work() { return {}; }

int main() {
#ifdef KVANT_MUST_FAIL
  work();
#else
  return work().ok() ? 0 : 1;
#endif
}
