#include "cli/app.hpp"

int main(int argc, char** argv) {
  return kvant_cli_main(argc, argv);
}
