// libggml-kvant.so: what ggml calls after loading it. Options come from KVANT_* variables.
#include "kvant/ggml_backend.h"
#include "messages.h"

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
  namespace kg = kvant::ggml;
  kvant::Status status = kg::check_ggml();
  kg::Options options;
  if (status.ok()) status = kg::options_from_environment({}, &options);
  if (status.ok()) status = kg::configure(options);
  if (!status.ok()) {
    kg::print_error(status.message() + "; the KVANT device is not available");
    return nullptr;
  }
  for (const std::string& line : kg::unknown_variables()) kg::print_note(line);
  return kg::backend_reg();
}
