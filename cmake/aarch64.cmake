# Toolchain: 64-bit ARM Linux from a Debian machine of another architecture (g++-aarch64-linux-gnu, qemu-user). Test
# programs run under qemu: scripts/check_aarch64.sh, or
#   cmake -S . -B build/aarch64 --toolchain cmake/aarch64.cmake -DGTest_ROOT=... -Dfmt_DIR=...
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# Programs are the build machine's; libraries are never (a GTest or OpenMP of x86 must not be picked up). Packages are
# found anywhere: fmt, nlohmann-json and Eigen are headers.
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
