#!/usr/bin/env bash
# nvcc_logged.sh COMPILER ARGS...: runs a compiler and keeps what ptxas says of each kernel in OBJECT.ptxas, out of the
# build's output. The CUDA compiler launcher of src/CMakeLists.txt; scripts/check_cuda_ledger.py reads the files.
#
# ccache, where it is installed, gives back objects and messages of before: all kernels take 13 minutes on two cores. It
# goes by the files that a unit includes (CCACHE_DEPEND), not by preprocessed text, which lacks what is for one
# architecture only.
set -uo pipefail
object= previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
messages=$(mktemp)
trap 'rm -f "$messages"' EXIT
command -v ccache >/dev/null && export CCACHE_DEPEND=1 && set -- ccache "$@"
"$@" 2>"$messages"
status=$?
# A line of its own for each fact: "ptxas info    : ..." and, indented below it, the bytes of stack and spills.
is_ledger='^ptxas info |^ptxas info$|bytes stack frame,'
[ -n "$object" ] && grep -E "$is_ledger" "$messages" >"$object.ptxas"
grep -vE "$is_ledger" "$messages" >&2
exit $status
