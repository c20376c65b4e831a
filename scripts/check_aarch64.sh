#!/usr/bin/env bash
# Cross-compiles the library and a selection of its tests for 64-bit ARM and runs them under qemu. What only an ARM
# machine can get wrong: the NEON verbs, and bytes that differ from those written on x86 (float contraction,
# conversions, signed char). Debian packages: g++-aarch64-linux-gnu, qemu-user, googletest. Everything lands in
# build/aarch64.
#
# The library is compiled a layer at a time (unity), as other runs show that every file compiles alone.
#
# qemu is about twenty times slower than the machine, so that the grid runs on NEON alone.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build="$root/build/aarch64"
jobs=${KVANT_JOBS:-$(nproc)}
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache)

# Each line: a test executable and those of its tests that run (a GoogleTest filter). The longest come first.
selection=(
  "store_test *-Store.EveryRangeOfTokens:Store.ThousandsOfVectors"
  "attention_features_test *"
  "attention_grid_test *_neon"
  "attention_random_test */0:*/1"
  "page_tail_test *"
  "pack_test *"
  "frozen_test *"
  "encode_test Encoding.MatchesTheWrittenAlgorithmBitForBit"
  "codec_test Edges.*:Lut.*"
  "golden_test *"
  "bits_test *"
)

# GoogleTest comes as source for the build machine's architecture only, so it is built here, once.
cross=(-G Ninja --toolchain "$root/cmake/aarch64.cmake" -DCMAKE_BUILD_TYPE=Release "${launcher[@]}")
if [ ! -d "$build/gtest-installed" ]; then
  cmake -S /usr/src/googletest -B "$build/gtest" "${cross[@]}" \
    -DBUILD_GMOCK=OFF -DCMAKE_INSTALL_PREFIX="$build/gtest-new"
  cmake --build "$build/gtest" --parallel "$jobs" --target install
  mv "$build/gtest-new" "$build/gtest-installed"
fi

# fmt is used as headers only, but its CMake package lies in a folder of the build machine's architecture.
fmt=$(find /usr/lib /usr/share /usr/local -name fmt-config.cmake -printf '%h\n' 2>/dev/null | head -n 1)
cmake -S "$root" -B "$build" "${cross[@]}" \
  -DKVANT_CUDA=OFF -DKVANT_OPENMP=OFF -DKVANT_BUILD_CLI=OFF -DKVANT_BUILD_EXAMPLES=OFF \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -DGTest_ROOT="$build/gtest-installed" -Dfmt_DIR="$fmt"
cmake --build "$build" --parallel "$jobs" --target "${selection[@]%% *}"

"$root/scripts/check_isa_objects.sh" "$build"

# run_one "EXECUTABLE FILTER": fails also when the filter selects nothing, which GoogleTest calls a success.
run_one() {
  local name=${1%% *} filter=${1#* } begin=$SECONDS
  local log="$build/$name.log"
  if qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/bin/$name" --gtest_filter="$filter" --gtest_brief=1 >"$log" 2>&1 &&
    grep -qE '^\[  PASSED  \] [1-9]' "$log"; then
    printf '%s: %d passed, %d s\n' "$name" "$(passed "$log")" $((SECONDS - begin))
  else
    cat "$log"
    printf '%s: FAILED\n' "$name"
    return 1
  fi
}
passed() { sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\{0,1\}\.$/\1/p' "$1"; }
export build
export -f run_one passed

printf '%s\0' "${selection[@]}" | xargs -0 -P "$jobs" -I{} bash -c 'run_one "$1"' _ {}
all=0
for line in "${selection[@]}"; do all=$((all + $(passed "$build/${line%% *}.log"))); done
printf '%d passed under qemu\n' "$all"
