#!/usr/bin/env bash
# Copies the header-only libraries that kvant is compiled with from this machine into third_party/, each with its
# licence, for a source distribution that builds where they are not installed (cmake/third_party.cmake). Git does not
# have that folder: what others wrote stays out of the repository.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
new="$root/third_party.new"
rm -rf "$new"
trap 'rm -rf "$new"' EXIT

# carry NAME HEADER PACKAGE: HEADER or its folder, as the compiler finds it, and the licence text that Debian's PACKAGE
# has.
carry() {
  local name=$1 header=$2 package=$3 found
  found=$(printf '#include <%s>\n' "$header" | "${CXX:-g++}" -std=c++20 -E -x c++ - 2>/dev/null |
    sed -n "s|^# [0-9]* \"\(.*/$header\)\".*|\1|p" | head -n 1)
  [ -n "$found" ] || { printf 'third_party.sh: <%s> was not found; install %s\n' "$header" "$package" >&2; exit 1; }
  local licence="/usr/share/doc/$package/copyright"
  [ -f "$licence" ] ||
    { printf 'third_party.sh: %s is missing: the licence of %s must be carried, too\n' "$licence" "$name" >&2; exit 1; }
  mkdir -p "$new/$name/include"
  if [[ $header == */* ]]; then
    cp -rL "$(dirname "$found")" "$new/$name/include/"
  else
    cp -L "$found" "$new/$name/include/"  # it lies among those of others
  fi
  cp "$licence" "$new/$name/LICENSE"
}

carry fmt fmt/format.h libfmt-dev
carry nlohmann_json nlohmann/json.hpp nlohmann-json3-dev
carry CLI11 CLI/CLI.hpp libcli11-dev
carry xxHash xxhash.h libxxhash-dev

rm -rf "$root/third_party"
mv "$new" "$root/third_party"
du -sh "$root"/third_party/*
