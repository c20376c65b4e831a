#!/usr/bin/env bash
# Every header compiles alone: the public ones and the internal ones as C++20, the C header as C89 to C17 and as C++.
# Public ones also with the flags of hosts that have neither exceptions nor run-time types.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${KVANT_JOBS:-$(nproc)}
export cxx=${CXX:-g++}
made=$(mktemp -d)  # core/kinds.hpp, which a build makes
export made
trap 'rm -rf "$made"' EXIT
cmake -DTARGET="$made/core" -P cmake/write_kinds.cmake
cc=${CC:-gcc}

alone() {  # alone COMPILER LANGUAGE STANDARD HEADER [FLAGS..]
  local compiler=$1 language=$2 standard=$3 header=$4
  shift 4
  # A header as the main file would warn about #pragma once: include it instead, and twice, to see that it is guarded.
  printf '#include "%s"\n#include "%s"\n' "$header" "$header" |
    "$compiler" -x "$language" "-std=$standard" -fsyntax-only -Wall -Wextra -Wshadow -Werror \
      -Iinclude -Isrc -I"$made" "$@" - ||
    { printf '%s does not compile alone as %s\n' "$header" "$standard"; return 1; }
}
export -f alone

failed=0
headers=$({ cd include && find kvant -name '*.hpp'; cd ../src && find base codec core io -name '*.hpp'; } | sort)
xargs -P "$jobs" -I{} bash -c 'alone "$cxx" c++ c++20 "$1"' _ {} <<<"$headers" || failed=1
alone "$cxx" c++ c++20 kvant/kvant.hpp \
  -fno-exceptions -fno-rtti -fshort-enums -funsigned-char -fvisibility=hidden -Ofast || failed=1
for standard in c89 c99 c11 c17; do alone "$cc" c "$standard" kvant/kvant.h -pedantic-errors || failed=1; done
alone "$cxx" c++ c++11 kvant/kvant.h || failed=1
[ $failed = 0 ] && printf 'headers: %d compile alone, kvant.h also as C89 to C17 and C++11\n' "$(wc -l <<<"$headers")"
exit $failed
