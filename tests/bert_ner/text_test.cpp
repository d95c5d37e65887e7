
#include "text.h"

#include <gtest/gtest.h>

#include <string>

#include "../support/scratch.h"

namespace bert_ner {
namespace {

std::string error_of(std::string_view text) {
  try {
    parse_json(text, "config.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(JsonFile, IsParsed) {
  const test_support::Scratch folder;
  const auto json =
      read_json(folder.write("config.json", R"({"a": [1, {"a": 2}], "b": {"a": 3}})"));
  EXPECT_EQ(json["a"][1]["a"], 2);
  EXPECT_EQ(json["b"]["a"], 3);
}

TEST(JsonFile, IsRefusedIfAKeyStandsTwiceInOneObject) {
  EXPECT_EQ(error_of(R"({"a": {"hidden": 1, "hidden": 2}})"),
            "config.json: the JSON key \"hidden\" stands twice in one object; remove one of them");
  EXPECT_TRUE(error_of(R"({"a": {"b": 1}, "a": 1})").find("\"a\" stands twice") !=
              std::string::npos);
  EXPECT_TRUE(error_of(R"({"a": 1, "\u0061": 1})").find("\"a\" stands twice") != std::string::npos);
}

TEST(JsonFile, IsRefusedWithTheLineOfAMistake) {
  EXPECT_TRUE(error_of("{\n\"a\": 1,\n\"b\" 2}")
                  .starts_with("config.json: is not valid JSON (parse error at line 3, column 5"))
      << error_of("{\n\"a\": 1,\n\"b\" 2}");
  EXPECT_TRUE(error_of("").starts_with("config.json: is not valid JSON (parse error at line 1"));
  EXPECT_TRUE(error_of("{\n\"\xC3\x28\"}").find("line 2, column 3") != std::string::npos);
  EXPECT_TRUE(error_of("{\n\"\xC3\x28\"}").find("ill-formed UTF-8") != std::string::npos);
}

TEST(JsonFile, IsRefusedIfItIsNestedWithoutEnd) {
  EXPECT_TRUE(error_of(std::string(1 << 20, '[')).find("not valid JSON") != std::string::npos);
  EXPECT_TRUE(error_of(std::string(60, '[') + std::string(60, ']')) == "no error");
}

TEST(WriteFile, ReplacesAFileAsAWholeAndLeavesNoOther) {
  const test_support::Scratch folder;
  write_file(folder / "out", [](std::ostream& file) { file << "one"; });
  write_file(folder / "out", [](std::ostream& file) {
    file << "two"
         << "three";
  });
  EXPECT_EQ(read_file(folder / "out"), "twothree");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(WriteFile, NamesFileAndReasonWhereItCannotBegin) {
  const test_support::Scratch folder;
  const auto error = [&](const std::filesystem::path& path) -> std::string {
    try {
      check_writable(path);
    } catch (const InputError& refused) {
      return refused.what();
    }
    return "no error";
  };
  EXPECT_EQ(error(folder / "out"), "no error");
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  EXPECT_NE(error(folder / "missing" / "out").find("cannot be created (No such"),
            std::string::npos);
  EXPECT_NE(error(folder.path()).find("is a folder"), std::string::npos);
}

}  // namespace
}  // namespace bert_ner
