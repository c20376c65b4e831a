# Flags every target of ours gets. They come after those of CMAKE_CXX_FLAGS and of a host project, and so win.
add_library(kvant_flags INTERFACE)

# Arithmetic means what the language says, whatever a host sets for its own code (-ffast-math, -Ofast, -mfpmath=387): a
# NaN is refused, an infinity hides a key, and encoding gives the same bits on every instruction set. Contraction is off
# for the last reason: fused operations are written out where they are wanted. src/base/config.hpp stops a unit that a
# compiler would read otherwise. Exceptions and run-time types are on (both are used inside), and nothing is left to
# optimisation at link time: objects of an instruction set of their own stay apart.
set(kvant_arithmetic -fno-fast-math -ffp-contract=off -fno-rounding-math)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND kvant_arithmetic -fno-single-precision-constant -fno-cx-limited-range)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND kvant_arithmetic -mfpmath=sse)
endif()
target_compile_options(kvant_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:${kvant_arithmetic};-fno-lto>
  $<$<COMPILE_LANGUAGE:CXX>:-fexceptions;-frtti>)

target_compile_options(kvant_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wshadow;-Wpointer-arith;-Wcast-qual;-Wundef>
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor;-Woverloaded-virtual>)
if(NOT PROJECT_IS_TOP_LEVEL AND NOT KVANT_WARNINGS_AS_ERRORS)
  # A host's -Werror with warnings of its own choice is for the host's code.
  target_compile_options(kvant_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-w>)
endif()
if(KVANT_WARNINGS_AS_ERRORS)
  target_compile_options(kvant_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
endif()
if(KVANT_SANITIZE)
  target_compile_options(kvant_flags INTERFACE
    -fsanitize=${KVANT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvant_flags INTERFACE -fsanitize=${KVANT_SANITIZE})
endif()
# UndefinedBehaviorSanitizer beside AddressSanitizer, which stops at the same access when a pointer is null or dangling
# or leaves its object. Without these questions a test compiles in nine tenths of the time, and a unit of kernels,
# where those of sums of pointers go, too, in half. What reads a pointer that is known to be null stays, and stops.
set(kvant_sanitize_kernels)  # further options of such units
if(KVANT_SANITIZE MATCHES "address" AND KVANT_SANITIZE MATCHES "undefined")
  target_compile_options(kvant_flags INTERFACE -fno-sanitize=null,object-size,vptr -fno-delete-null-pointer-checks)
  set(kvant_sanitize_kernels -fno-sanitize=pointer-overflow)
  message(STATUS "kvant: left to AddressSanitizer: null, object-size and vptr, in kernels also pointer-overflow")
endif()
