// The layout of a snapshot: a safetensors file with these tensors and metadata (docs/snapshots.md). This is version
// kVersion; a change of any of it is another version.
//
//   encoded        U8  [n, layers, kv_heads, block bytes]   slots of encoded pages, docs/formats.md
//   exact          U8  [n, layers, kv_heads, block bytes]   slots of exact pages
//   encoded.places, exact.places   I32 [n, 2]   with bases only: of each slot, the file (0: this one) and its row there
//   sequences      I64 [n, 3]   length, first page that no window released, how many token ids
//   pages          I64 [n, 3]   of all sequences one after another: exact slot, encoded slot, identity; -1: none
//   tokens         I64 [n]      token ids of the sequences that have them, one after another
//   k_levels, v_levels          F32 [n]
//   k_bases, v_bases            F32 [layers * kv_heads, D + 2 D D]   centre, matrix, inverse; calibrated ones only
//   checksums      U64 [n, 2]   XXH3, 128 bits (low half, high half): of the header with its length; of each row of
//                               `encoded` and `exact` and of all other tensors whole, in the order of the file; and of
//                               all these checksums. The last tensor.
//
// A tensor without elements is left out.
#pragma once

#include <cstddef>

namespace kvant::snapshot {

inline constexpr const char* kVersion = "1";

inline constexpr const char* kEncoded = "encoded";
inline constexpr const char* kExact = "exact";
inline constexpr const char* kEncodedPlaces = "encoded.places";
inline constexpr const char* kExactPlaces = "exact.places";
inline constexpr const char* kSequences = "sequences";
inline constexpr const char* kPages = "pages";
inline constexpr const char* kTokens = "tokens";
inline constexpr const char* kKLevels = "k_levels";
inline constexpr const char* kVLevels = "v_levels";
inline constexpr const char* kKBases = "k_bases";
inline constexpr const char* kVBases = "v_bases";
inline constexpr const char* kChecksums = "checksums";

// Metadata: keys of kvant's own begin with this, all others are the caller's.
inline constexpr const char* kOwn = "kvant.";
inline constexpr const char* kVersionKey = "kvant.snapshot";
inline constexpr const char* kWrittenBy = "kvant.version";
inline constexpr const char* kName = "kvant.name";
inline constexpr const char* kModel = "kvant.model";
// And 1, 2, ...: "CHECKSUM NAME", the last of its checksums in hex. JSON has no name that is not UTF-8: in its place is
// "/" and its bytes in hex, since no file has a "/" in its name.
inline constexpr const char* kBase = "kvant.base.";

/// A new file names at most so many others. Where it would need more, it has all of its pages itself: so the time and
/// the descriptors of a load have a bound, however long a chain of saves is.
inline constexpr std::size_t kMostBases = 32;

}  // namespace kvant::snapshot
