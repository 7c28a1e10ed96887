# Sanitizers, coverage and fuzzing change every object of the build, so they are set for the whole tree.
if(KVANT_SANITIZE)
  # -O1 keeps stack traces true and the build short; it comes after the build type's own level.
  add_compile_options(-O1 -g1 -fsanitize=${KVANT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${KVANT_SANITIZE})
endif()

# Kernels are thousands of inlined vector operations in a few functions. With a check of every pointer that such an
# operation gets (null, aligned, large enough) one of these files takes as long to compile as everything else; the
# address sanitizer sees the same loads and stores, so in kernels only those checks are left out. Shifts, signed
# overflow, bounds and the rest stay.
set(KVANT_KERNEL_OPTIONS "")
if(KVANT_FUZZ)
  # Paths that inputs take are in the code around kernels, and undefined behaviour in them is for the sanitizers' run.
  # Highway's own assertions would need its library; kvant uses its headers alone.
  set(KVANT_KERNEL_OPTIONS -O1 -g1 -fno-sanitize=fuzzer-no-link,undefined -DHWY_IS_DEBUG_BUILD=0)
elseif(KVANT_SANITIZE MATCHES "undefined")
  set(KVANT_KERNEL_OPTIONS -O1 -g1 -fno-sanitize=null,alignment,object-size)
endif()

if(KVANT_COVERAGE)
  # Kernels of single instruction sets are not counted (tools/checks.sh), so they need not be slow either.
  set(KVANT_KERNEL_OPTIONS -O1 -g0 -finline -fno-profile-arcs -fno-test-coverage)
  add_compile_options(--coverage -fprofile-update=atomic -Og -fno-inline)
  add_link_options(--coverage)
endif()

if(KVANT_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "KVANT_FUZZ needs clang++ (-DCMAKE_CXX_COMPILER=clang++); this is ${CMAKE_CXX_COMPILER_ID}")
  endif()
  # Everything is instrumented; only the targets in fuzz/ link libFuzzer's main (-fsanitize=fuzzer).
  add_compile_options(-O1 -g1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
endif()
