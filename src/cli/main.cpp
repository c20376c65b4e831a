#include "cli/app.hpp"

int main(int argc, char** argv) {
  return kvant::cli::run_app(argc, argv);
}
