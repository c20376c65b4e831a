# Flags every target of ours gets. Contraction is off because encoding must give the same bits with and without FMA
# units: fused operations are written out where they are wanted.
add_library(kvant_flags INTERFACE)
target_compile_options(kvant_flags INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wshadow;-Wpointer-arith;-Wcast-qual;-Wundef;-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor;-Woverloaded-virtual>)
if(KVANT_WARNINGS_AS_ERRORS)
  target_compile_options(kvant_flags INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
endif()
if(KVANT_SANITIZE)
  target_compile_options(kvant_flags INTERFACE -fsanitize=${KVANT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(kvant_flags INTERFACE -fsanitize=${KVANT_SANITIZE})
endif()
