#!/usr/bin/env bash
# check_install.sh BUILD_FOLDER SDIST: installs kvant (the static library of that build, then a shared one) into a temporary prefix
# and uses it from outside the source tree: find_package from CMake, pkg-config from a shell. What a packager does, and what
# breaks first when a header is not installed.
#
# The shared library is built from the source distribution SDIST, with the headers that it carries in place of the system's and
# without Eigen: so nothing is missing there. It is compiled a layer at a time and hardly optimised: what is looked at are its
# symbols and that it works.
set -euo pipefail
built=$(cd "${1:?usage: check_install.sh BUILD_FOLDER SDIST}" && pwd)
sdist=${2:?usage: check_install.sh BUILD_FOLDER SDIST}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache)

for kind in static shared; do
  prefix="$work/$kind"
  if [ $kind = shared ]; then
    built="$root/build/install-shared"
    rm -rf "$built/source"
    mkdir -p "$built/source"
    tar -xzf "$sdist" -C "$built/source" --strip-components=1
    cmake -S "$built/source" -B "$built" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG' -DBUILD_SHARED_LIBS=ON \
      -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -DKVANT_CUDA=OFF -DKVANT_BUILD_TESTS=OFF \
      -DKVANT_BUILD_EXAMPLES=OFF -DKVANT_CALIBRATE=AUTO "${launcher[@]}" \
      -DCMAKE_DISABLE_FIND_PACKAGE_{fmt,nlohmann_json,CLI11,Eigen3}=ON | grep 'from third_party/'
    cmake --build "$built" >/dev/null
  fi
  cmake --install "$built" --prefix "$prefix" >/dev/null

  cp -r "$root/examples/find_package" "$work/user-$kind"
  cmake -S "$work/user-$kind" -B "$work/user-$kind/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  cmake --build "$work/user-$kind/build" >/dev/null
  "$work/user-$kind/build/user"
  printf 'find_package(kvant), %s: works\n' $kind

  # The tool of a build without Eigen refuses to calibrate, with a sentence.
  if [ $kind = shared ]; then
    refusal=$("$prefix/bin/kvant" calibrate "$root/data/gemma4-nano-qkv.safetensors" -o "$work/bases" 2>&1) &&
      { printf 'kvant calibrate ended well in a build without calibration\n'; exit 1; }
    grep -q 'built without calibration' <<<"$refusal" || { printf 'kvant calibrate said: %s\n' "$refusal"; exit 1; }
    printf 'source distribution: builds with what it carries\n'
  fi

  # Only the API is exported from the shared library: anything else is a promise made by accident.
  if [ $kind = shared ]; then
    library=$(find "$prefix" -name 'libkvant.so' | head -n 1)
    leaked=$(nm -DC --defined-only "$library" | awk '{$1=""; print}' | grep -vE ' (kvant_|kvant::|typeinfo (name )?for kvant::|vtable for kvant::)' |
      grep -E '^ [TDBR] ' || true)
    internal=$(nm -DC --defined-only "$library" | grep -E ' [TDBR] kvant::(base|codec|core|cpu)::' || true)
    [ -z "$leaked$internal" ] || { printf 'the shared library exports more than the API:\n%s\n%s\n' "$leaked" "$internal"; exit 1; }
    declared=$(grep -oE '^KVANT_C_API [^(]*\b(kvant_[a-z_]+)\(' "$root/include/kvant/kvant.h" | grep -oE 'kvant_[a-z_]+\($' | tr -d '(' | sort)
    exported=$(nm -D --defined-only "$library" | awk '{print $3}' | grep -E '^kvant_' | sort)
    [ -n "$declared" ] && diff <(printf '%s\n' "$declared") <(printf '%s\n' "$exported") ||
      { printf 'kvant.h (<) and the exported C functions (>) differ\n'; exit 1; }
    printf 'exported symbols: the API only; all %d functions of kvant.h\n' "$(wc -l <<<"$declared")"
  fi

  config=$(find "$prefix" -name kvant.pc -printf '%h\n' | head -n 1)
  if command -v pkg-config >/dev/null; then
    export PKG_CONFIG_PATH=$config
    static=(); [ $kind = static ] && static=(--static)
    # shellcheck disable=SC2046
    g++ -std=c++20 "$root/examples/quickstart.cpp" -o "$work/quickstart-$kind" $(pkg-config --cflags --libs "${static[@]}" kvant)
    LD_LIBRARY_PATH=$(dirname "$config") "$work/quickstart-$kind" >/dev/null
    printf 'pkg-config, %s: works\n' $kind
  fi
done
