#!/usr/bin/env bash
# check_install.sh BUILD_FOLDER SDIST: installs kvant (the static library of that build, then a shared one) into a
# temporary prefix and uses it from outside the source tree, from C++ and from C: find_package from CMake, pkg-config
# from a shell. What a packager does, and what breaks first when a header is not installed. Then as a folder of a host
# project that knows C alone and sets flags that change arithmetic, forbid exceptions and make warnings errors. The C
# host prints hashes of what is stored and computed, which must be the same in all three.
#
# The shared library is built from the source distribution SDIST, with the headers that it carries in place of the
# system's and without Eigen: so nothing is missing there. It is compiled a layer at a time and hardly optimised: what
# is looked at are its symbols and that it works.
set -euo pipefail
built=$(cd "${1:?usage: check_install.sh BUILD_FOLDER SDIST}" && pwd)
sdist=${2:?usage: check_install.sh BUILD_FOLDER SDIST}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_C_COMPILER_LAUNCHER=ccache)

# same_lines NAME: what the C host printed is what the first one did.
same_lines() {
  [ -s "$work/$1.txt" ] || { printf 'the C host (%s) printed nothing\n' "$1"; exit 1; }
  diff "$work/static.txt" "$work/$1.txt" ||
    { printf 'the C host computes something else when kvant is built as %s (>)\n' "$1"; exit 1; }
}

for kind in static shared; do
  prefix="$work/$kind"
  if [ $kind = shared ]; then
    built="$root/build/install-shared"
    rm -rf "$built"  # its files are older than objects of before would be
    mkdir -p "$built/source"
    tar -xzf "$sdist" -C "$built/source" --strip-components=1
    cmake -S "$built/source" -B "$built" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG' -DBUILD_SHARED_LIBS=ON \
      -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -DKVANT_CUDA=OFF -DKVANT_BUILD_TESTS=OFF \
      -DKVANT_BUILD_EXAMPLES=OFF -DKVANT_CALIBRATE=AUTO "${launcher[@]}" \
      -DCMAKE_DISABLE_FIND_PACKAGE_{fmt,nlohmann_json,CLI11,Eigen3}=ON | grep 'from third_party/'
    cmake --build "$built" >/dev/null
  fi
  cmake --install "$built" --prefix "$prefix" >/dev/null

  for document in share/bash-completion/completions/kvant share/zsh/site-functions/_kvant \
    share/fish/vendor_completions.d/kvant.fish share/man/man1/kvant.1; do
    grep -q 'exact.*ends' "$prefix/$document" ||
      { printf '%s is not installed, or lacks --exact-ends\n' "$document"; exit 1; }
  done
  printf 'manual page and shell completions, %s: installed\n' $kind

  cp -r "$root/examples/find_package" "$work/user-$kind"
  cmake -S "$work/user-$kind" -B "$work/user-$kind/build" \
    -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  cmake --build "$work/user-$kind/build" >/dev/null
  "$work/user-$kind/build/user"
  printf 'find_package(kvant), %s: works\n' $kind

  cmake -S "$root/tests/hosts/c_host" -B "$work/c-$kind" \
    -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
  cmake --build "$work/c-$kind" >/dev/null
  "$work/c-$kind/host" >"$work/$kind.txt" || { tail -n 1 "$work/$kind.txt"; exit 1; }
  same_lines $kind
  printf 'find_package(kvant) from C alone, %s: works\n' $kind

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
    leaked=$(nm -DC --defined-only "$library" | awk '{$1=""; print}' |
      grep -vE ' (kvant_|kvant::|typeinfo (name )?for kvant::|vtable for kvant::)' |
      grep -E '^ [TDBR] ' || true)
    internal=$(nm -DC --defined-only "$library" | grep -E ' [TDBR] kvant::(base|codec|core|cpu)::' || true)
    [ -z "$leaked$internal" ] ||
      { printf 'the shared library exports more than the API:\n%s\n%s\n' "$leaked" "$internal"; exit 1; }
    declared=$(grep -oE '^KVANT_C_API [^(]*\b(kvant_[a-z_]+)\(' "$root/include/kvant/kvant.h" |
      grep -oE 'kvant_[a-z_]+\($' | tr -d '(' | sort)
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
    g++ -std=c++20 "$root/examples/quickstart.cpp" -o "$work/quickstart-$kind" \
      $(pkg-config --cflags --libs "${static[@]}" kvant)
    LD_LIBRARY_PATH=$(dirname "$config") "$work/quickstart-$kind" >/dev/null
    # shellcheck disable=SC2046
    gcc -std=c11 "$root/examples/c_example.c" -o "$work/c-example-$kind" \
      $(pkg-config --cflags --libs "${static[@]}" kvant) -lm
    LD_LIBRARY_PATH=$(dirname "$config") "$work/c-example-$kind" >/dev/null
    printf 'pkg-config from C++ and C, %s: works\n' $kind
  fi
done

# The soname has the minor version, since before 1.0 each may change the C++ interface.
readelf -d "$library" | grep -q 'SONAME.*libkvant\.so\.[0-9]*\.[0-9]*\]' ||
  { printf 'the soname is not libkvant.so.MAJOR.MINOR\n'; exit 1; }

host="$root/build/install-host"
flags='-ffast-math -frounding-math -fno-exceptions -fno-rtti -Wconversion -Wsign-conversion -Werror'
[[ $(c++ --version) == *clang* ]] || flags+=' -fsingle-precision-constant'
cmake -S "$root/tests/hosts/c_host" -B "$host" -G Ninja -DKVANT_SOURCE="$root" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_FLAGS="$flags" -DCMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG' \
  -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 \
  "${launcher[@]}" >"$work/host.log"
grep -q 'no CUDA backend (KVANT_CUDA=OFF)' "$work/host.log" ||
  { printf 'a subproject compiles CUDA unasked:\n'; grep kvant "$work/host.log"; exit 1; }
cmake --build "$host" >"$work/host-build.log" 2>&1 || { tail -n 40 "$work/host-build.log"; exit 1; }
"$host/host" >"$work/subproject.txt" || { tail -n 1 "$work/subproject.txt"; exit 1; }
same_lines subproject
printf 'add_subdirectory from C alone, with %s: works, same bits\n' "$flags"

# What cannot be made right is refused when a build is configured, with the reason.
refused=$(cmake -S "$root/tests/hosts/c_host" -B "$work/refused" -G Ninja -DKVANT_SOURCE="$root" \
  -DCMAKE_{C,CXX}_FLAGS=-m32 -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY 2>&1) &&
  { printf -- '-m32 was taken\n'; exit 1; }
grep -q '64-bit target' <<<"$refused" || { printf -- '-m32 was refused for another reason: %s\n' "$refused"; exit 1; }
if echo '#include "base/config.hpp"' |
  "${CXX:-c++}" -std=c++20 -ffast-math -I"$root/src" -x c++ -fsyntax-only - 2>/dev/null; then
  printf 'base/config.hpp takes -ffast-math\n'
  exit 1
fi
printf 'a 32-bit target, and -ffast-math outside of CMake: refused\n'
