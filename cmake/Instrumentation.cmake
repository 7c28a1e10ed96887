# Sanitizers, coverage and fuzzing change every object of the build, so they are set for the whole tree.
if(KVANT_SANITIZE)
  add_compile_options(-fsanitize=${KVANT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${KVANT_SANITIZE})
endif()

if(KVANT_COVERAGE)
  add_compile_options(--coverage -O0 -fno-inline)
  add_link_options(--coverage)
endif()

if(KVANT_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "KVANT_FUZZ needs clang++ (-DCMAKE_CXX_COMPILER=clang++); this is ${CMAKE_CXX_COMPILER_ID}")
  endif()
  # Everything is instrumented; only the targets in fuzz/ link libFuzzer's main (-fsanitize=fuzzer).
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
endif()
