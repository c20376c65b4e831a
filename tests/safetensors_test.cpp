// The reader refuses every file that is not exactly what the format says, with a message that names what is wrong; the
// writer's files come back as they were given.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kvant/io.hpp"
#include "support/process.hpp"
#include "support/temporary_directory.hpp"

namespace kvant::io {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::TemporaryDirectory;

std::span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string with_length(std::uint64_t length, const std::string& rest) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + rest;
}

/// A whole file: length, header, `data_bytes` zeros.
std::string file_of(const std::string& header, std::size_t data_bytes = 0) {
  return with_length(header.size(), header + std::string(data_bytes, '\0'));
}

/// The message that parsing `file` under the name "f" ends with; empty: it was accepted.
std::string refusal(const std::string& file) {
  const auto parsed = SafeTensors::parse(bytes_of(file), "f");
  if (!parsed) {
    EXPECT_EQ(parsed.code(), Code::bad_file) << parsed.message();
  }
  return parsed.message();
}

// --- The form of a file ----------------------------------------------------------------------------------------------

struct Hostile {
  const char* name;
  std::string file;
  std::string message;  // after "f: "
};

// One tensor of four bytes, with the given fields.
std::string one(const std::string& fields, std::size_t data_bytes = 4) {
  return file_of("{\"a\":{" + fields + "}}", data_bytes);
}

const char* const kGood = R"("dtype":"U8","shape":[4],"data_offsets":[0,4])";

std::vector<Hostile> hostile_files() {
  const std::string dtypes =
      "allowed: F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, U16, U8, BOOL";
  const std::string integers = "; allowed: integers from 0 to 2^63 - 1";
  const std::string two =
      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":)";
  std::string ones = "1";
  for (int i = 0; i < 40; ++i) ones += ",1";
  const std::string deep(100000, '[');
  return {
      {"empty file", "", "0 bytes; a safetensors file has at least 8 (its header length) and 2 (\"{}\")"},
      {"seven bytes", "1234567", "7 bytes; a safetensors file has at least 8 (its header length) and 2 (\"{}\")"},
      {"header length 0", with_length(0, "{}"), "header length 0; allowed: at least 2 (\"{}\")"},
      {"header length 1", with_length(1, "{}"), "header length 1; allowed: at least 2 (\"{}\")"},
      {"header longer than the file", with_length(100, "{}"),
       "header length 100, but only 2 bytes follow: the file is truncated"},
      {"header length 2^64 - 1", with_length(~std::uint64_t{0}, "{}"),
       "header length 18446744073709551615; allowed: at most 100000000 (is this a safetensors file?)"},
      {"header over 100 MB", with_length(100'000'001, "{}"),
       "header length 100000001; allowed: at most 100000000 (is this a safetensors file?)"},
      {"header exactly 100 MB, truncated", with_length(100'000'000, "{}"),
       "header length 100000000, but only 2 bytes follow: the file is truncated"},

      {"not JSON", file_of("hello"), "the header starts with \"h\"; allowed: a JSON object"},
      {"byte order mark", file_of("\xef\xbb\xbf{}"), "the header starts with \"\\xef\"; allowed: a JSON object"},
      {"leading blank", file_of(" {}"), "the header starts with \" \"; allowed: a JSON object"},
      {"an array", file_of("[]"), "the header starts with \"[\"; allowed: a JSON object"},
      {"NUL after the object", file_of(std::string("{}\0", 3)), "the header holds a NUL byte at 2"},
      {"NUL hides rubbish", file_of(std::string("{}\0rubbish", 10)), "the header holds a NUL byte at 2"},
      {"unfinished object", file_of("{\"a\":"),
       "not valid JSON at byte 6 of the header: parse error at line 1, column 6: syntax error while parsing value - "
       "unexpected "
       "end of input; expected '[', '{', or a literal"},
      {"second object", file_of("{}{}"),
       "not valid JSON at byte 3 of the header: parse error at line 1, column 3: syntax error while parsing value - "
       "unexpected "
       "'{'; expected end of input"},
      {"comment", file_of("{/**/}"),
       "not valid JSON at byte 2 of the header: parse error at line 1, column 2: syntax error while parsing object key "
       "- invalid "
       "literal; last read: '{/'; expected string literal"},
      {"name of invalid UTF-8", file_of("{\"\xff\":{}}"),
       "not valid JSON at byte 3 of the header: parse error at line 1, column 3: syntax error while parsing object key "
       "- invalid "
       "string: ill-formed UTF-8 byte; last read: '\"\\xff'; expected string literal"},
      {"lone surrogate", file_of(R"({"\ud800":{}})"),
       "not valid JSON at byte 9 of the header: parse error at line 1, column 9: syntax error while parsing object key "
       "- invalid "
       "string: surrogate U+D800..U+DBFF must be followed by U+DC00..U+DFFF; last read: '\"\\ud800\"'; expected string "
       "literal"},
      {"number beyond a double", one(R"("dtype":"U8","shape":[1e999],"data_offsets":[0,4])"),
       "not valid JSON at byte 33 of the header: number overflow parsing '1e999'"},
      {"depth 100,000", file_of("{\"a\":" + deep), "tensor \"a\" is or holds an array; allowed: a JSON object"},
      {"depth 100,000 in a shape", one("\"shape\":" + deep), "tensor \"a\": shape is or holds an array" + integers},
      {"depth in a field", one(R"("dtype":{"a":1})"), "tensor \"a\": dtype is or holds an object; allowed: a string"},

      {"tensor is a string", file_of(R"({"a":"b"})"), "tensor \"a\" is or holds \"b\"; allowed: a JSON object"},
      {"tensor is null", file_of(R"({"a":null})"), "tensor \"a\" is or holds null; allowed: a JSON object"},
      {"tensor is a number", file_of(R"({"a":-1})"), "tensor \"a\" is or holds -1; allowed: a JSON object"},
      {"tensor without a name", file_of(R"({"":{}})"), "a tensor has an empty name"},
      {"NUL in a name", file_of(R"({"a\u0000b":{}})"), "the name \"a\\x00b\" holds a NUL character"},
      {"tensor twice", file_of("{\"a\":{" + std::string(kGood) + "},\"a\":{" + kGood + "}}", 4),
       "tensor \"a\" occurs twice"},
      {"no dtype", one(R"("shape":[4],"data_offsets":[0,4])"), "tensor \"a\": dtype is missing"},
      {"no shape", one(R"("dtype":"U8","data_offsets":[0,4])"), "tensor \"a\": shape is missing"},
      {"no offsets", one(R"("dtype":"U8","shape":[4])"), "tensor \"a\": data_offsets is missing"},
      {"field twice", one(R"("dtype":"U8","dtype":"U8")"), "tensor \"a\": dtype occurs twice"},
      {"unknown field", one(R"("stride":[1])"),
       "tensor \"a\": unknown field \"stride\"; allowed: dtype, shape, data_offsets"},

      {"metadata is an array", file_of(R"({"__metadata__":[]})"),
       "\"__metadata__\" is or holds an array; allowed: a JSON object"},
      {"metadata number", file_of(R"({"__metadata__":{"k":1}})"), "metadata \"k\" is or holds 1; allowed: strings"},
      {"metadata object", file_of(R"({"__metadata__":{"k":{}}})"),
       "metadata \"k\" is or holds an object; allowed: strings"},
      {"metadata true", file_of(R"({"__metadata__":{"k":true}})"), "metadata \"k\" is or holds true; allowed: strings"},
      {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})"), "__metadata__ occurs twice"},
      {"metadata key twice", file_of(R"({"__metadata__":{"k":"1","k":"2"}})"), "metadata \"k\" occurs twice"},
      {"NUL in metadata", file_of(R"({"__metadata__":{"k":"a\u0000"}})"), "metadata \"k\" holds a NUL character"},

      {"dtype is a number", one(R"("dtype":8)"), "tensor \"a\": dtype is or holds 8; allowed: a string"},
      {"unknown dtype", one(R"("dtype":"Q4_0","shape":[4],"data_offsets":[0,4])"),
       "tensor \"a\": dtype is \"Q4_0\"; " + dtypes},
      {"lower case dtype", one(R"("dtype":"f32","shape":[1],"data_offsets":[0,4])"),
       "tensor \"a\": dtype is \"f32\"; " + dtypes},
      {"shape is a number", one(R"("shape":4)"), "tensor \"a\": shape is or holds 4; allowed: an array of integers"},
      {"negative dimension", one(R"("shape":[-4])"), "tensor \"a\": shape is or holds -4" + integers},
      {"fractional dimension", one(R"("shape":[4.5])"), "tensor \"a\": shape is or holds 4.5" + integers},
      {"exponent dimension", one(R"("shape":[4e0])"), "tensor \"a\": shape is or holds 4e0" + integers},
      {"text dimension", one(R"("shape":["4"])"), "tensor \"a\": shape is or holds \"4\"" + integers},
      {"dimension 2^63", one(R"("shape":[9223372036854775808])"),
       "tensor \"a\": shape is or holds 9223372036854775808" + integers},
      {"dimension 2^64", one(R"("shape":[18446744073709551616])"),
       "tensor \"a\": shape is or holds 18446744073709551616" + integers},
      {"41 dimensions", one("\"dtype\":\"U8\",\"shape\":[" + ones + "]", 1),
       "tensor \"a\": shape has more than 32 dimensions"},
      {"shape overflows to 0", one(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4])"),
       "tensor \"a\": shape [4294967296, 4294967296] of U8 overflows"},
      {"bytes overflow", one(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,4])"),
       "tensor \"a\": shape [2305843009213693952] of F64 overflows"},

      {"no offset", one(R"("data_offsets":[])"), "tensor \"a\": data_offsets has 0 entries; allowed: [begin, end]"},
      {"one offset", one(R"("data_offsets":[0])"), "tensor \"a\": data_offsets has 1 entries; allowed: [begin, end]"},
      {"three offsets", one(R"("data_offsets":[0,4,4])"),
       "tensor \"a\": data_offsets has more than two entries; allowed: [begin, end]"},
      {"negative offset", one(R"("data_offsets":[-1,3])"), "tensor \"a\": data_offsets is or holds -1" + integers},
      {"end before begin", one(R"("dtype":"U8","shape":[4],"data_offsets":[4,0])"),
       "tensor \"a\": data_offsets [4, 0]; allowed: begin <= end <= 4 (the bytes after the header)"},
      {"end beyond the file", one(R"("dtype":"U8","shape":[5],"data_offsets":[0,5])"),
       "tensor \"a\": data_offsets [0, 5]; allowed: begin <= end <= 4 (the bytes after the header)"},
      {"end 2^64 - 1", one(R"("dtype":"U8","shape":[5],"data_offsets":[0,18446744073709551615])"),
       "tensor \"a\": data_offsets [0, 18446744073709551615]; allowed: begin <= end <= 4 (the bytes after the header)"},
      {"offsets shorter than the shape", one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"),
       "tensor \"a\": data_offsets [0, 4] span 4 bytes, but shape [2] of F32 needs 8"},
      {"offsets longer than the shape", one(R"("dtype":"F16","shape":[1],"data_offsets":[0,4])"),
       "tensor \"a\": data_offsets [0, 4] span 4 bytes, but shape [1] of F16 needs 2"},
      {"empty shape, wrong bytes", one(R"("dtype":"F16","shape":[],"data_offsets":[0,4])"),
       "tensor \"a\": data_offsets [0, 4] span 4 bytes, but shape [] of F16 needs 2"},
      {"same bytes twice", file_of(two + "[0,4]}}", 4),
       "tensor \"b\" starts at 0 and overlaps tensor \"a\", which ends at 4"},
      {"overlap", file_of(two + "[3,7]}}", 7), "tensor \"b\" starts at 3 and overlaps tensor \"a\", which ends at 4"},
      {"gap", file_of(two + "[5,9]}}", 9),
       "tensor \"b\" starts at 5, but the data before it ends at 4; allowed: no gaps"},
      {"gap at the start", one(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])"),
       "tensor \"a\" starts at 1, but the data before it ends at 0; allowed: no gaps"},
      {"empty tensor out of place", file_of(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})", 4),
       "tensor \"a\" starts at 2, but the data before it ends at 0; allowed: no gaps"},
      {"trailing bytes", one(kGood, 5),
       "5 bytes of data after the header, but its tensors end at 4; allowed: no trailing bytes"},
      {"data without tensors", file_of("{}", 1),
       "1 bytes of data after the header, but its tensors end at 0; allowed: no trailing bytes"},
      {"truncated data", one(kGood, 3),
       "tensor \"a\": data_offsets [0, 4]; allowed: begin <= end <= 3 (the bytes after the header)"},
  };
}

TEST(SafeTensorsRefusal, EveryHostileFileHasItsMessage) {
  for (const Hostile& hostile : hostile_files()) {
    EXPECT_EQ(refusal(hostile.file), "f: " + hostile.message) << hostile.name;
  }
}

TEST(SafeTensorsRefusal, EveryTruncationOfAGoodFile) {
  const std::string good = one(kGood);
  ASSERT_EQ(refusal(good), "");
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_NE(refusal(good.substr(0, size)), "") << "cut to " << size << " bytes";
  }
}

TEST(SafeTensorsRefusal, LongNamesDoNotFloodTheMessage) {
  const std::string message = refusal(file_of("{\"" + std::string(100000, 'n') + "\":1}"));
  EXPECT_LT(message.size(), 300u);
  EXPECT_NE(message.find("... (100000 bytes)"), std::string::npos) << message;
}

TEST(SafeTensorsRefusal, PathsThatAreNotFiles) {
  const TemporaryDirectory directory;
  const auto open_message = [](const std::string& path) {
    const auto opened = SafeTensors::open(path);
    EXPECT_EQ(opened.code(), Code::io);
    return opened.message();
  };
  const std::string folder = directory / "";
  const std::string absent = directory / "absent";
  const std::string pipe = directory / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(open_message(folder), folder + ": is a directory; allowed: a regular file");
  EXPECT_EQ(open_message(absent), absent + ": cannot open: No such file or directory");
  EXPECT_EQ(open_message(pipe), pipe + ": is not a regular file (a pipe, socket or device); copy it to a file first");
  EXPECT_EQ(open_message(""), ": the path is empty or holds a NUL; allowed: the path of a regular file");

  const std::string empty = directory / "empty";
  std::ofstream(empty).close();
  EXPECT_EQ(SafeTensors::open(empty).message(),
            empty + ": 0 bytes; a safetensors file has at least 8 (its header length) and 2 (\"{}\")");
}

// --- What is accepted ------------------------------------------------------------------------------------------------

TEST(SafeTensors, TheSmallestFilesAreAccepted) {
  EXPECT_EQ(refusal(file_of("{}")), "");
  EXPECT_EQ(refusal(file_of("{}      ")), "");
  EXPECT_EQ(refusal(file_of(R"({"__metadata__":{}})")), "");
  EXPECT_EQ(refusal(file_of(R"({"a":{"dtype":"F64","shape":[3,0,9223372036854775807],"data_offsets":[0,0]}})")), "");
}

TEST(SafeTensors, TensorsAreSortedByOffsetAndFoundByName) {
  const std::string file = file_of(
      R"({"z":{"dtype":"U8","shape":[],"data_offsets":[1,2]},"a":{"dtype":"I8","shape":[2,1],"data_offsets":[2,4]},)"
      R"("m":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},"__metadata__":{"who":"me"}})",
      4);
  const auto parsed = SafeTensors::parse(bytes_of(file), "f");
  ASSERT_TRUE(parsed.ok()) << parsed.message();
  ASSERT_EQ(parsed->tensors().size(), 3u);
  EXPECT_EQ(parsed->tensors()[0].name, "m");
  EXPECT_EQ(parsed->tensors()[1].name, "z");
  EXPECT_EQ(parsed->tensors()[2].name, "a");
  EXPECT_EQ(parsed->metadata().at("who"), "me");
  ASSERT_NE(parsed->find("a"), nullptr);
  EXPECT_EQ(parsed->find("a")->elements(), 2);
  EXPECT_EQ(parsed->find("z")->elements(), 1);
  EXPECT_EQ(parsed->find("b"), nullptr);
  EXPECT_EQ(parsed->require("aa").message(), "f: no tensor \"aa\"; it has 3 tensors, the nearest: \"a\", \"m\", \"z\"");
  EXPECT_EQ(parsed->find("m")->to_f32().message(),
            "tensor \"m\": dtype \"BOOL\" has no real values; allowed: F64, F32, F16, BF16 and the integers");
}

TEST(SafeTensors, ValuesOfEveryDtypeAtAnOddAddress) {
  // One byte before, so that no tensor lies at a multiple of its size.
  const auto value_of = [](const std::string& dtype, const auto& raw) {
    const std::string header = R"({"pad":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":")" + dtype +
                               R"(","shape":[1],"data_offsets":[1,)" + std::to_string(1 + sizeof raw) + "]}}";
    std::string file = file_of(header, 1 + sizeof raw);
    std::memcpy(file.data() + file.size() - sizeof raw, &raw, sizeof raw);
    const auto parsed = SafeTensors::parse(bytes_of(file), "f");
    EXPECT_TRUE(parsed.ok()) << parsed.message();
    const auto narrow = parsed->find("x")->to_f32();
    const auto wide = parsed->find("x")->to_f64();
    EXPECT_TRUE(narrow.ok() && wide.ok());
    EXPECT_EQ(static_cast<float>((*wide)[0]), (*narrow)[0]) << dtype;
    return (*wide)[0];
  };
  EXPECT_EQ(value_of("F64", 1.0 / 3.0), 1.0 / 3.0);
  EXPECT_EQ(value_of("F32", -2.5f), -2.5);
  EXPECT_EQ(value_of("F16", std::uint16_t{0x3555}), 0.333251953125);
  EXPECT_EQ(value_of("F16", std::uint16_t{0x0001}), 0x1p-24);
  EXPECT_EQ(value_of("BF16", std::uint16_t{0xc049}), -3.140625);
  EXPECT_EQ(value_of("I64", std::int64_t{-5}), -5);
  EXPECT_EQ(value_of("I32", std::int32_t{-70000}), -70000);
  EXPECT_EQ(value_of("I16", std::int16_t{-300}), -300);
  EXPECT_EQ(value_of("I8", std::int8_t{-128}), -128);
  EXPECT_EQ(value_of("U64", std::uint64_t{1} << 63), 0x1p63);
  EXPECT_EQ(value_of("U32", std::uint32_t{4000000000}), 4e9);
  EXPECT_EQ(value_of("U16", std::uint16_t{65535}), 65535);
  EXPECT_EQ(value_of("U8", std::uint8_t{255}), 255);
}

TEST(SafeTensors, StaysValidWhenMoved) {
  const TemporaryDirectory directory;
  const std::string path = directory / "a";
  const std::vector<float> values = {1, 2, 3};
  ASSERT_TRUE(write_safetensors(path, std::vector<TensorToWrite>{{"x", "F32", {3}, bytes_of(values)}}, {}).ok());
  auto first = SafeTensors::open(path);
  ASSERT_TRUE(first.ok()) << first.message();
  SafeTensors second = std::move(*first);
  EXPECT_EQ(*second.find("x")->to_f32(), values);
  EXPECT_EQ(second.path(), path);
}

// --- Files that others change ----------------------------------------------------------------------------------------

class ChangedFile : public ::testing::Test {
 protected:
  void SetUp() override {
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(i % 65521);
    write(path_);
    // The system tells times of writes apart only from one of its ticks to the next, which are up to 10 ms long.
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }

  // q, k and v of one captured layer, 3 MB: more than a reader takes at once.
  void write(const std::string& path) const {
    const std::vector<TensorToWrite> tensors = {{"layer0.q", "F32", {1, 8, 32}, bytes_of(values_).first(1024)},
                                                {"layer0.k", "F32", {1, 12288, 32}, bytes_of(values_)},
                                                {"layer0.v", "F32", {1, 12288, 32}, bytes_of(values_)}};
    ASSERT_TRUE(write_safetensors(path, tensors, {}).ok());
  }

  // Another process does it, and is done when this returns.
  static void in_another_process(const std::function<bool()>& change) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(change() ? 0 : 1);
    int how = 0;
    ASSERT_EQ(::waitpid(child, &how, 0), child);
    ASSERT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 0);
  }

  template <class Read>
  void expect_refused(const Read& read) const {
    EXPECT_EQ(read.code(), Code::io);
    EXPECT_EQ(read.message(),
              path_ + ": another program changed the file while it was open; read it again when it is complete");
  }

  TemporaryDirectory directory_;
  std::string path_ = directory_ / "changing";
  std::vector<float> values_ = std::vector<float>(12288 * 32);
};

TEST_F(ChangedFile, ThatIsShortenedGivesAnError) {
  for (const off_t length : {off_t{0}, off_t{500}, off_t{1 << 20}, off_t{2 << 20}}) {
    write(path_);
    const auto file = SafeTensors::open(path_);
    ASSERT_TRUE(file.ok()) << file.message();
    in_another_process([&] { return ::truncate(path_.c_str(), length) == 0; });
    for (const TensorInfo& tensor : file->tensors()) {
      expect_refused(tensor.to_f32());
      expect_refused(tensor.to_f64());
      expect_refused(tensor.read());
    }
    expect_refused(read_captured_layers(*file));
  }
}

TEST_F(ChangedFile, ThatIsRewrittenGivesAnError) {
  const auto file = SafeTensors::open(path_);
  ASSERT_TRUE(file.ok()) << file.message();
  ASSERT_EQ(file->find("layer0.k")->to_f32().value(), values_);
  in_another_process([&] {
    const int fd = ::open(path_.c_str(), O_WRONLY);
    return ::pwrite(fd, "changed", 7, 2 << 20) == 7 && ::close(fd) == 0;
  });
  expect_refused(file->find("layer0.k")->to_f32());
  expect_refused(read_captured_layers(*file));
}

TEST_F(ChangedFile, ThatIsReplacedIsReadAsItWas) {
  const auto file = SafeTensors::open(path_);
  ASSERT_TRUE(file.ok()) << file.message();
  in_another_process([&] { return write_safetensors(path_, {}, {}).ok(); });
  EXPECT_EQ(file->find("layer0.v")->to_f32().value(), values_);
  in_another_process([&] { return ::unlink(path_.c_str()) == 0; });
  EXPECT_EQ(read_captured_layers(*file).value().front().v, values_);
}

// While one thread reads over and over, another process shortens the file: every result is right or refused.
TEST_F(ChangedFile, InMidReadGivesAnError) {
  const auto file = SafeTensors::open(path_);
  ASSERT_TRUE(file.ok()) << file.message();
  const TensorInfo* values = file->find("layer0.v");
  std::atomic<bool> is_shortened = false;
  std::atomic<int> right = 0, refused = 0;
  std::thread reader([&] {
    for (bool is_last = false; !is_last;) {
      is_last = is_shortened;
      const auto read = values->to_f32();
      if (read.ok()) {
        EXPECT_EQ(*read, values_);
        ++right;
      } else {
        expect_refused(read);
        ++refused;
      }
    }
  });
  while (right == 0 && refused == 0) std::this_thread::yield();
  in_another_process([&] { return ::truncate(path_.c_str(), 1 << 20) == 0; });
  is_shortened = true;
  reader.join();
  EXPECT_GT(right, 0);
  EXPECT_GT(refused, 0);
}

// --- Writing ---------------------------------------------------------------------------------------------------------

// The byte of the file where a tensor begins, from its header alone.
std::uint64_t place_in_file(const std::string& path, const std::string& tensor) {
  const std::string file = test::file_text(path);
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const nlohmann::json header = nlohmann::json::parse(file.substr(8, length));
  return 8 + length + header[tensor]["data_offsets"][0].get<std::uint64_t>();
}

TEST(SafeTensorsWriter, RandomFilesComeBackAsGiven) {
  const TemporaryDirectory directory;
  const std::string path = directory / "round.safetensors";
  const std::vector<std::pair<std::string, std::size_t>> dtypes = {{"F64", 8}, {"F32", 4}, {"BF16", 2},
                                                                   {"U8", 1},  {"I16", 2}, {"BOOL", 1}};
  const std::vector<std::string> alphabet = {"a",     ".", "\"", "\\", "\n", "\xc3\xa9", "\xf0\x9f\x98\x80",
                                             "layer", " ", "{"};
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const auto text = [&] {
    std::string out;
    for (std::size_t n = below(6); n > 0; --n) out += alphabet[below(alphabet.size())];
    return out;
  };
  for (int round = 0; round < 200; ++round) {
    std::map<std::string, std::string> metadata;
    for (std::size_t n = below(4); n > 0; --n) metadata[text()] = text();
    std::vector<TensorToWrite> tensors;
    std::vector<std::vector<std::uint8_t>> data(below(8));
    for (std::size_t i = 0; i < data.size(); ++i) {
      const auto& [dtype, size] = dtypes[below(dtypes.size())];
      std::vector<std::int64_t> shape(below(4));
      std::size_t bytes = size;
      for (auto& extent : shape) bytes *= static_cast<std::size_t>(extent = static_cast<std::int64_t>(below(5)));
      data[i].resize(bytes);
      for (auto& byte : data[i]) byte = static_cast<std::uint8_t>(random());
      tensors.push_back({text() + std::to_string(i), dtype, shape, bytes_of(data[i])});
    }
    const Status written = write_safetensors(path, tensors, metadata);
    ASSERT_TRUE(written.ok()) << written.message();
    const auto read = SafeTensors::open(path);
    ASSERT_TRUE(read.ok()) << read.message();
    EXPECT_EQ(read->metadata(), metadata);
    ASSERT_EQ(read->tensors().size(), tensors.size());
    for (const TensorToWrite& tensor : tensors) {
      const TensorInfo* found = read->find(tensor.name);
      ASSERT_NE(found, nullptr) << tensor.name;
      EXPECT_EQ(found->dtype, tensor.dtype);
      EXPECT_EQ(found->shape, tensor.shape);
      EXPECT_TRUE(std::ranges::equal(found->read().value(), tensor.data));
      if (found->bytes > 0) {
        const std::size_t alignment = tensor.data.size() / static_cast<std::size_t>(found->elements());
        EXPECT_EQ(place_in_file(path, tensor.name) % alignment, 0u) << "not aligned to its element";
      }
    }
  }
  EXPECT_EQ(directory.files(), 1u) << "temporary files were left behind";
}

TEST(SafeTensorsWriter, RefusalsNameTheTensorAndTheValue) {
  const std::vector<std::uint8_t> four(4);
  const std::string absent = "/nonexistent-directory/x";
  const auto message = [&](std::vector<TensorToWrite> tensors, std::map<std::string, std::string> metadata = {}) {
    const Status status = write_safetensors(absent, tensors, metadata);
    EXPECT_EQ(status.code(), Code::invalid_argument) << status.message();
    const std::string prefix = absent + ": not written: ";
    EXPECT_TRUE(status.message().starts_with(prefix)) << status.message();
    return status.message().substr(std::min(prefix.size(), status.message().size()));
  };
  const auto data = bytes_of(four);
  EXPECT_EQ(message({{"", "U8", {4}, data}}), "tensor \"\": this name is not allowed; any other is");
  EXPECT_EQ(message({{"__metadata__", "U8", {4}, data}}),
            "tensor \"__metadata__\": this name is not allowed; any other is");
  EXPECT_EQ(message({{"a", "U8", {4}, data}, {"a", "U8", {4}, data}}), "tensor \"a\": occurs twice");
  EXPECT_EQ(message({{"a", "U8", {5}, data}}), "tensor \"a\": 4 bytes of data, but shape [5] of U8 needs 5");
  EXPECT_EQ(message({{"a", "U8", {-4}, data}}),
            "tensor \"a\": 4 bytes of data, but shape [-4] of U8 is negative or overflows");
  EXPECT_EQ(message({{"a", "U4", {8}, data}}),
            "tensor \"a\": dtype is \"U4\"; allowed: F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, "
            "U32, U16, U8, BOOL");
  EXPECT_EQ(message({{"a", "U8", std::vector<std::int64_t>(33, 1), data}}),
            "tensor \"a\": 33 dimensions; allowed: at most 32");
  EXPECT_EQ(message({{"\xff", "U8", {4}, data}}), "a name or a metadata value is not valid UTF-8");
  EXPECT_EQ(message({}, {{"k", "\xff"}}), "a name or a metadata value is not valid UTF-8");
  EXPECT_EQ(message({{std::string("a\0b", 3), "U8", {4}, data}}), "tensor \"a\\x00b\" holds a NUL");
  EXPECT_EQ(message({}, {{"k", std::string("v\0", 2)}}), "metadata value \"v\\x00\" holds a NUL");
}

TEST(SafeTensorsWriter, AFailedWriteLosesNothing) {
  const TemporaryDirectory directory;
  const std::string path = directory / "kept";
  const std::vector<float> first = {1, 2};
  const std::vector<float> second = {3, 4};
  const auto write = [](const std::string& to, const std::vector<float>& values) {
    return write_safetensors(to, std::vector<TensorToWrite>{{"x", "F32", {2}, bytes_of(values)}}, {});
  };
  ASSERT_TRUE(write(path, first).ok());

  // A target that cannot be replaced: the directory itself.
  const std::string folder = directory / "folder";
  fs::create_directory(folder);
  const Status to_folder = write(folder, second);
  EXPECT_EQ(to_folder.code(), Code::io);
  EXPECT_EQ(to_folder.message(), folder + ": not written: is a directory; name a file");

  const std::string beside = directory / "absent/x";
  EXPECT_EQ(write(beside, second).message(),
            beside + ": not written: cannot create a file beside it: No such file or directory");

  // A file too large for the process: the write itself fails half way.
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 16, .rlim_max = 16};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(2);
    const Status status = write(path, second);
    ::_exit(status.code() == Code::io && status.message() == path + ": not written: cannot write: File too large" ? 0
                                                                                                                  : 1);
  }
  int how = 0;
  ASSERT_EQ(::waitpid(child, &how, 0), child);
  EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 0);

  EXPECT_EQ(*SafeTensors::open(path)->find("x")->to_f32(), first);
  EXPECT_EQ(directory.files(), 2u) << "temporary files were left behind";
  ASSERT_TRUE(write(path, second).ok());
  EXPECT_EQ(*SafeTensors::open(path)->find("x")->to_f32(), second);
}

}  // namespace
}  // namespace kvant::io
