#!/usr/bin/env bash
# check_isa_objects.sh BUILD_FOLDER: the units compiled for one instruction set leak nothing into the rest.
#
# If isa_avx2.o held a weak copy of, say, std::vector<int>::push_back, the linker could pick that copy for the whole
# program, which would then stop with an illegal instruction on an older machine. So such a unit may define one global
# symbol (its table of functions), weak symbols only inside its own inline namespace, and no dynamic initialisers
# (they would run on every machine). Nor may it ask the compiler's runtime library what the machine has
# (__builtin_cpu_supports), which says no where another toolchain links another library: src/cpu/x86_features.hpp.
set -euo pipefail
folder=${1:?usage: check_isa_objects.sh BUILD_FOLDER}
shopt -s nullglob
# The benchmarks' units are absent where only the library was built.
benchmarks=("$folder"/src/CMakeFiles/kvant_bench.dir/bench/peaks_*.o)
objects=("$folder"/src/CMakeFiles/kvant_cpu.dir/cpu/isa_*.o)
[ ${#objects[@]} -gt 0 ] || { printf 'no isa_*.o under %s: build it first\n' "$folder"; exit 1; }
objects+=("${benchmarks[@]}")

failed=0 checked=0
complain() { printf '%s: %s\n' "$1" "$2"; failed=1; }
for object in "${objects[@]}"; do
  isa=$(basename "$object"); isa=${isa#isa_}; isa=${isa#peaks_}; isa=${isa%%.*}
  name=$(basename "$object")
  # Units for another architecture compile to nothing (on 64-bit ARM but for mapping symbols, `$d`).
  symbols=$(nm -C --defined-only "$object" 2>/dev/null | sed '/ r \$d$/d')
  [ -n "$symbols" ] || continue
  checked=$((checked + 1))
  globals=$(printf '%s\n' "$symbols" | grep -cE '^[0-9a-f]* [TDBRGSC] ' || true)
  [ "$globals" = 1 ] || complain "$name" "defines $globals global symbols; it may define only its table of functions:
$(printf '%s\n' "$symbols" | grep -E '^[0-9a-f]* [TDBRGSC] ' || true)"
  foreign=$(printf '%s\n' "$symbols" | grep -E '^[0-9a-f]* [WVu] ' | grep -vE "kvant::([a-z_]+::)*$isa::" || true)
  [ -z "$foreign" ] || complain "$name" "holds inline code from outside namespace $isa ($(wc -l <<<"$foreign") symbols):
$(head -n 8 <<<"$foreign")"
  if nm "$object" 2>/dev/null | grep -qE '__cpu_(model|indicator_init|features2)'; then
    complain "$name" "asks the compiler's runtime library what the machine has; x86_features.hpp asks the machine"
  fi
  sections=$(readelf -SW "$object")
  if grep -qE '\.(init_array|ctors)' <<<"$sections"; then complain "$name" "has dynamic initialisers"; fi
done
# The scalar unit and one more: an architecture whose own unit came out empty has lost its flags or its macro.
[ $checked -ge 2 ] || complain "$folder" "only $checked of ${#objects[@]} ISA units have code"
[ $failed = 0 ] && printf 'ISA objects: %d, one global symbol each, nothing foreign, no dynamic initialisers\n' $checked
exit $failed
