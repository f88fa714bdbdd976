/* A read beside a buffer, compiled with the kernel: the tests see whether it would be noticed. */
#include <stdint.h>

float labo_read_beside(const float *values, int64_t count) { return values[count]; }
