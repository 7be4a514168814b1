/* What this CPU can do, as far as a level of the kernels needs it (`levels.py`). This file is compiled for every
   CPU. gcc also asks whether the operating system saves the registers. */
#include <stdio.h>

const char *features(void) {
    static char found[128];
#ifdef __x86_64__
#define HAS(NAME) (__builtin_cpu_supports(NAME) ? NAME " " : "")
    __builtin_cpu_init();
    snprintf(found, sizeof found, "%s%s%s%s%s%s%s%s%s", HAS("sse4.2"), HAS("popcnt"), HAS("avx"), HAS("avx2"),
             HAS("fma"), HAS("avx512f"), HAS("avx512bw"), HAS("avx512dq"), HAS("avx512vl"));
#endif
    return found;
}
