/// \file
/// The program as a user starts it.
#pragma once

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../support/scratch.h"
#include "tiny_corpus.h"

namespace bert_ner::test {

using Arguments = std::vector<std::string>;

/// The names of the checkpoints in a folder that --save wrote, the newest last.
inline std::vector<std::string> checkpoint_names(const std::filesystem::path& saved) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(saved / "checkpoints", error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (name.starts_with("checkpoint-")) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

struct Outcome {
  int status = 0;
  std::string out, err;
};

class ProgramRuns : public testing::Test {
 protected:
  /// Starts the program; its output goes to files of the scratch folder.
  pid_t start(Arguments arguments, rlim_t largest_file = RLIM_INFINITY) const {
    arguments.insert(arguments.begin(), BERT_NER_PROGRAM);
    setenv("OMP_NUM_THREADS", "1", 1);  // more cost more than they gain on so small a model
    std::vector<char*> pointers;
    for (auto& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const auto out = (scratch_ / "stdout").string(), err = (scratch_ / "stderr").string();
    const pid_t child = fork();
    if (child != 0) return child;
    constexpr mode_t kMode = 0600;
    dup2(open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, kMode), STDOUT_FILENO);
    dup2(open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, kMode), STDERR_FILENO);
    const rlimit limit{largest_file, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    execv(pointers.front(), pointers.data());
    _exit(127);
  }

  Outcome finish(pid_t child) const {
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            test_support::bytes_of(scratch_ / "stdout"),
            test_support::bytes_of(scratch_ / "stderr")};
  }

  Outcome run(Arguments arguments, rlim_t largest_file = RLIM_INFINITY) const {
    return finish(start(std::move(arguments), largest_file));
  }

  /// A short run of the tiny model.
  Arguments training(Arguments more) const {
    Arguments arguments{"--model",      BERT_NER_TEST_DATA "/tiny_bert",
                        "--data",       corpus_.string(),
                        "--epochs",     "8",
                        "--batch-size", "4"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  test_support::Scratch scratch_;
  std::filesystem::path corpus_ = write_tiny_corpus(scratch_, "corpus.txt", 36);
};

}  // namespace bert_ner::test
