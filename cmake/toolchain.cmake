# What kvant cannot be built for is refused here, with the reason, rather than in the middle of a build.
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  message(FATAL_ERROR "kvant needs a 64-bit target (caches are larger than 4 GiB); "
    "this compiler builds for ${CMAKE_SIZEOF_VOID_P} bytes a pointer: leave -m32 out, or choose another toolchain")
endif()
if(CMAKE_CXX_BYTE_ORDER STREQUAL "BIG_ENDIAN")
  message(FATAL_ERROR "kvant needs a little-endian target: the bytes of a page are read as they lie in memory")
endif()
if(WIN32 OR CMAKE_CXX_COMPILER_FRONTEND_VARIANT STREQUAL "MSVC" OR
   NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang|AppleClang|IntelLLVM)$")
  message(FATAL_ERROR "kvant needs a POSIX system and GCC 11 or clang 14, or newer, "
    "whose attributes and assembler its kernels are written with; "
    "this is ${CMAKE_CXX_COMPILER_ID} for ${CMAKE_SYSTEM_NAME} (${CMAKE_CXX_COMPILER}): "
    "set CMAKE_CXX_COMPILER, or build under WSL")
endif()
if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11) OR
   (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14))
  message(FATAL_ERROR "kvant needs GCC 11 or clang 14, or newer, for C++20; "
    "this is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER}): set CMAKE_CXX_COMPILER")
endif()
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_FLAGS "-std=c++20 -w")
check_cxx_source_compiles("
#include <algorithm>
#include <atomic>
#include <charconv>
int main() {
  int number = 0;
  double x = 0;
  const char text[] = {'1'};
  std::atomic_ref<int>(number).fetch_add(1);
  return std::ranges::find(text, '1') == text && std::from_chars(text, text + 1, x).ptr == text + 1 ? 0 : number;
}" KVANT_STANDARD_LIBRARY_SUFFICES)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT KVANT_STANDARD_LIBRARY_SUFFICES)
  unset(KVANT_STANDARD_LIBRARY_SUFFICES CACHE)
  message(FATAL_ERROR "kvant needs a C++20 standard library with std::atomic_ref, std::ranges algorithms and "
    "std::from_chars of floating-point numbers: libstdc++ of GCC 11 or newer, or libc++ 20 or newer; "
    "leave -stdlib=libc++ out, or use a newer one")
endif()
set(kvant_cuda_flags "${CMAKE_CUDA_FLAGS} ${CMAKE_CUDA_FLAGS_RELEASE} $ENV{CUDAFLAGS}")
if(kvant_cuda_flags MATCHES "use_fast_math|ftz=true|prec-div=false|prec-sqrt=false")
  set(kvant_cuda_fast_math ON)
else()
  set(kvant_cuda_fast_math OFF)
endif()

# The C++ runtime's libraries (stdc++ and m, or c++), which a C compiler does not link.
set(kvant_runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
if(CMAKE_C_IMPLICIT_LINK_LIBRARIES)
  list(REMOVE_ITEM kvant_runtime ${CMAKE_C_IMPLICIT_LINK_LIBRARIES})
endif()
list(FILTER kvant_runtime INCLUDE REGEX "^[a-z+]+$")
list(REMOVE_DUPLICATES kvant_runtime)
