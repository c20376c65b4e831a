#include "support/guard.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace kvant::test {

GuardBuffer::GuardBuffer(std::size_t bytes, std::size_t slack) : bytes_(bytes) {
  page_ = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t inside = (bytes + slack + page_ - 1) / page_ * page_;
  mapped_ = inside + 2 * page_;
  void* mapping = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  if (inside > 0) {
    if (mprotect(mapping_ + page_, inside, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    std::memset(mapping_ + page_, 0xff, inside);
  }
  payload_ = mapping_ + page_ + inside - slack - bytes;
}

GuardBuffer::~GuardBuffer() {
  munmap(mapping_, mapped_);
}

bool GuardBuffer::padding_untouched() const {
  for (const std::byte* p = mapping_ + page_; p < mapping_ + mapped_ - page_; ++p) {
    if (p == payload_) p += bytes_;
    if (p >= mapping_ + mapped_ - page_) break;
    if (*p != std::byte{0xff}) return false;
  }
  return true;
}

void GuardBuffer::make_read_only() const {
  mprotect(mapping_ + page_, mapped_ - 2 * page_, PROT_READ);
}

}  // namespace kvant::test
