/* Expectations of the programs in C: what fails is printed and counted. */
#ifndef KVANT_TESTS_C_EXPECT_H
#define KVANT_TESTS_C_EXPECT_H

#include <kvant/kvant.h>

#include <stdio.h>
#include <string.h>

static int failures = 0;

static void expect(int condition, const char* text, int line) {
  if (condition) return;
  ++failures;
  printf("line %d: expected %s; last error: %s\n", line, text, kvant_last_error());
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)

static void expect_refused(kvant_status status, kvant_status wanted, const char* must_say, int line) {
  printf("%s: %s\n", kvant_status_name(status), kvant_last_error());
  if (status == wanted && strstr(kvant_last_error(), must_say) != NULL) return;
  ++failures;
  printf("line %d: expected %s and a message with \"%s\"\n", line, kvant_status_name(wanted), must_say);
}
#define EXPECT_REFUSED(call, wanted, must_say) expect_refused((call), (wanted), (must_say), __LINE__)

#endif
