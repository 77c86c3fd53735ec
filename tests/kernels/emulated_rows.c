/* Compares norms, gates and rotations of random numbers with plain loops, for `test_rows.py`, on a processor that an emulator
   stands for. */

#include "_rows.c"

#include <stdio.h>
#include <stdlib.h>

#define TOKENS 3
#define HEADS 2
#define MOST 200

static float x[TOKENS * HEADS * MOST], y[TOKENS * HEADS * MOST], z[TOKENS * MOST], out[TOKENS * HEADS * MOST];

static void draw(float *numbers, long count) {
    for (long i = 0; i < count; i++) numbers[i] = 6.0f * (float)rand() / (float)RAND_MAX - 3.0f;
}

static double norm_of_row(const float *row, long i, long size) {
    double sum = 0.0;
    for (long k = 0; k < size; k++) sum += (double)row[k] * (double)row[k];
    return (double)row[i] / sqrt(sum / (double)size + 1e-5) * (double)y[i];
}

/* The largest error of one operation. */
static double worst(char operation, const Kernel *kernel, long size) {
    const long bytes = size * (long)sizeof(float), heads = operation == 'r' ? HEADS : 1, half = size / 2;
    Rows rows = {.x = (char *)x, .y = (char *)y, .z = (char *)z, .out = (char *)out, .count = TOKENS, .size = size};
    rows.x_stride = rows.out_stride = heads * bytes, rows.y_stride = rows.z_stride = rows.head_stride = bytes;
    rows.heads = heads, rows.numbers[0] = operation == 'n' ? 1e-5f : 1.44269504f;
    (operation == 'n' ? kernel->norm : operation == 'g' ? kernel->gate : kernel->rotate)(&rows, 0, TOKENS);
    double most = 0.0;
    for (long row = 0; row < TOKENS * heads; row++)
        for (long i = 0; i < size; i++) {
            const float *from = x + row * size, *cosines = y + row / heads * size, *sines = z + row / heads * size;
            const double value = from[i], other = i < half ? -from[(i + half) % size] : from[i - half];
            const double exact = operation == 'n'   ? norm_of_row(from, i, size)
                                 : operation == 'g' ? value / (1.0 + exp(-value)) * (double)y[row * size + i]
                                                    : value * (double)cosines[i] + other * (double)sines[i];
            most = fmax(most, fabs(exact - (double)out[row * size + i]));
        }
    return most;
}

int main(void) {
    Choice found[MOST_CHOICES];
    choices(found);
    printf("%s", found[0].name);
    draw(x, TOKENS * HEADS * MOST), draw(y, TOKENS * HEADS * MOST), draw(z, TOKENS * MOST);
    for (long size = 2; size <= MOST; size += 18)
        for (const char *operation = "ngr"; *operation; operation++)
            if (!(worst(*operation, found[0].kernel, size) < 1e-5)) return *operation;
    return 0;
}
