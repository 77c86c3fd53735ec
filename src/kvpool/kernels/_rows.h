/* The arithmetic of `_rows.c`, which includes this file once for each instruction set. */

#include "_vectors.h"

/* Up to LANES numbers from place i of a row of `size` numbers; the lanes behind its end are 0. */
INLINE vec NAME(read)(const void *row, int kind, long i, long size) {
    const size_t each = kind == BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
    const char *from = (const char *)row + i * (long)each;
    if (i + LANES <= size) return kind == BFLOAT16 ? NAME(from_bfloat16)(from) : NAME(load)((const float *)from);
    float numbers[LANES] = {0};
    memcpy(numbers, from, (size_t)(size - i) * each);
    return kind == BFLOAT16 ? NAME(from_bfloat16)(numbers) : NAME(load)(numbers);
}

INLINE void NAME(write)(void *row, int kind, long i, long size, vec value) {
    const size_t count = (size_t)(i + LANES <= size ? LANES : size - i);
    if (kind == BFLOAT16) {
        const halves rounded = NAME(to_bfloat16)(value);
        memcpy((uint16_t *)row + i, &rounded, count * sizeof(uint16_t));
    } else if (count == LANES)
        NAME(store)((float *)row + i, value);
    else
        memcpy((float *)row + i, &value, count * sizeof(float));
}

INLINE void NAME(norm_of)(const Rows *rows, long number, const int kind) {
    const char *x = rows->x + number * rows->x_stride;
    char *out = rows->out + number * rows->out_stride;
    const long size = rows->size;
    vec squares = {0};
    for (long i = 0; i < size; i += LANES) {
        const vec value = NAME(read)(x, kind, i, size);
        squares += value * value;
    }
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += squares[i];
    const float scale = 1.0f / sqrtf(sum / (float)size + rows->numbers[0]);
    for (long i = 0; i < size; i += LANES) {
        const vec weight = NAME(read)(rows->y, kind, i, size);
        NAME(write)(out, kind, i, size, NAME(read)(x, kind, i, size) * scale * weight);
    }
}

/* x * y / (1 + 2 ** -(a * x + b * x ** 3)) */
INLINE void NAME(gate_of)(const Rows *rows, long number, const int kind) {
    const char *x = rows->x + number * rows->x_stride, *y = rows->y + number * rows->y_stride;
    char *out = rows->out + number * rows->out_stride;
    const float a = rows->numbers[0], b = rows->numbers[1];
    const vec most = NAME(all)(1e30f);
    for (long i = 0; i < rows->size; i += LANES) {
        const vec gate = NAME(read)(x, kind, i, rows->size), up = NAME(read)(y, kind, i, rows->size);
        const vec square = gate * gate, finite = NAME(choose)(square < most, square, most);
        const vec power = NAME(power)(-gate * (a + b * finite));
        NAME(write)(out, kind, i, rows->size, gate * up / (1.0f + power));
    }
}

/* All heads of a token, whose halves are turned by the angles of its position. */
INLINE void NAME(rotate_of)(const Rows *rows, long number, const int kind) {
    const long half = rows->size / 2, half_bytes = half * (kind == BFLOAT16 ? 2 : 4);
    const char *x = rows->x + number * rows->x_stride;
    const char *cosines = rows->y + number * rows->y_stride, *sines = rows->z + number * rows->z_stride;
    char *out = rows->out + number * rows->out_stride;
    for (long head = 0; head < rows->heads; head++, x += rows->head_stride, out += 2 * half_bytes)
        for (long i = 0; i < half; i += LANES) {
            const vec one = NAME(read)(x, kind, i, half), other = NAME(read)(x + half_bytes, kind, i, half);
            const vec first = one * NAME(read)(cosines, kind, i, half) - other * NAME(read)(sines, kind, i, half);
            const vec second = other * NAME(read)(cosines + half_bytes, kind, i, half) +
                               one * NAME(read)(sines + half_bytes, kind, i, half);
            NAME(write)(out, kind, i, half, first);
            NAME(write)(out + half_bytes, kind, i, half, second);
        }
}

#define FOR_ALL_ROWS(operation)                                                             \
    TARGET static void NAME(operation)(const void *given, long first, long last) {          \
        const Rows *rows = given;                                                           \
        for (long number = first; number < last; number++) {                                \
            if (rows->kind == BFLOAT16)                                                     \
                NAME(operation##_of)(rows, number, BFLOAT16);                               \
            else                                                                            \
                NAME(operation##_of)(rows, number, FLOAT32);                                \
        }                                                                                   \
    }

FOR_ALL_ROWS(norm)
FOR_ALL_ROWS(gate)
FOR_ALL_ROWS(rotate)

static const Kernel NAME(kernel) = {NAME(norm), NAME(gate), NAME(rotate)};

#undef FOR_ALL_ROWS
#include "_vectors_end.h"
