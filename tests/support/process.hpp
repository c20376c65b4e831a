// Runs a program and keeps what it printed.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/temporary_directory.hpp"

namespace kvant::test {

struct Finished {
  int exit_code = -1;  ///< -1: ended by a signal
  int signal = 0;
  std::string out, err;
};

inline std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline Finished run_program(const std::string& program, const std::vector<std::string>& arguments) {
  TemporaryDirectory folder;
  const std::string out = folder / "out", err = folder / "err";
  const pid_t child = fork();
  if (child == 0) {
    const auto redirect = [](int descriptor, const std::string& path) {
      const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(file, descriptor);
      ::close(file);
    };
    redirect(STDOUT_FILENO, out);
    redirect(STDERR_FILENO, err);
    std::vector<std::string> words = {program};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    execv(program.c_str(), pointers.data());
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  Finished finished;
  if (WIFEXITED(status)) finished.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) finished.signal = WTERMSIG(status);
  finished.out = file_text(out);
  finished.err = file_text(err);
  return finished;
}

}  // namespace kvant::test
