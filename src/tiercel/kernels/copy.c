/* Copies of rows between device memory of the CPU and host memory. One call moves whole pages or tails, and
   its caller does not hold the GIL meanwhile. `copy.py` has the plain twin. */
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* extents [extents, 7]: near, near_stride, near_part, far, far_stride, far_part, size (`transfer/extents.py`) */
void copy_extents(const i64 *extents, i64 count, const i64 *near_places, i64 near_parts, const i64 *far_places,
                  i64 far_parts, i64 items, char *host, i64 load) {
    for (i64 item = 0; item < items; item++)
        for (const i64 *e = extents; e < extents + 7 * count; e += 7) {
            char *near = (char *)e[0] + near_places[item * near_parts + e[2]] * e[1];
            char *far = host + e[3] + far_places[item * far_parts + e[5]] * e[4];
            if (load)
                memcpy(near, far, e[6]);
            else
                memcpy(far, near, e[6]);
        }
}
